"""Expert parallelism: N ranks equal one rank, whoever holds which expert; messages counted."""

import pytest
import torch
import torch.distributed as dist

from tests.models.small_models import random_model
from utils.measure.traffic import Traffic
from utils.memory.checkpointing import recompute
from utils.models import moe
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.parallel import experts
from utils.parallel.mesh import make_mesh
from utils.ranks import Ranks
from utils.shares import share

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"vocab_size": 61, "hidden_size": 24, "layers": 2, "heads": 4, "intermediate_size": 15}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4, device="cpu") as group:
        yield group


@pytest.fixture(scope="module")
def three():
    with Ranks(3, device="cpu") as group:
        yield group


def make_model(experts=6, count=2, **changes):
    config = GPTConfig(**{**SMALL, "experts": experts, "experts_per_token": count, **changes})
    return random_model(config, dtype=torch.float64)


def rows_of(rank, size, count):
    tokens = torch.randint(61, (count, 12), generator=torch.Generator().manual_seed(1))
    first, stop = share(count, rank, size)
    return tokens[first:stop, :-1], tokens[first:stop, 1:]


def learn(model, x, y, balance=0.0):
    moe.set_balance(model, balance)
    logits = model(x)
    cross_entropy(logits, y, reduction="sum").backward()
    return logits.detach()


def crowd(model, away_from):
    """No token may choose these experts any more."""
    for layer in moe.moe_layers(model):
        layer.bias = torch.zeros(layer.count)
        layer.bias[list(away_from)] = -9.0


def one_pass(ep, rows, sizes, away_from=(), capacity=None, mode="none", balance=0.0):
    """On a rank: its logits, its gradients (dense ones summed over all ranks), its traffic."""
    mesh = make_mesh(dp=dist.get_world_size(), ep=ep)
    model = experts.expert_parallel(make_model(**sizes), mesh.ep)
    crowd(model, away_from)
    for layer in moe.moe_layers(model):
        layer.capacity_factor = capacity
    recompute(model, mode)
    x, y = rows_of(mesh.dp.index, mesh.dp.size, rows)
    with Traffic() as traffic:
        logits = learn(model, x, y, balance)
    gradients = {}
    for name, parameter in model.named_parameters():
        axis = mesh.edp if moe.is_expert(name) else mesh.dp
        if axis.group is not None:
            dist.all_reduce(parameter.grad, group=axis.group)
        gradients[name] = parameter.grad
    loads = [(layer.counts.tolist(), layer.dropped) for layer in moe.moe_layers(model)]
    events = [(event.op, event.payload, int(event.sent)) for event in traffic.events]
    mesh.close()
    return {"logits": logits, "gradients": gradients, "loads": loads, "events": events}


def alone(rows, sizes, away_from=(), capacity=None, balance=0.0):
    model = make_model(**sizes)
    crowd(model, away_from)
    for layer in moe.moe_layers(model):
        layer.capacity_factor = capacity
    logits = learn(model, *rows_of(0, 1, rows), balance)
    return logits, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal_to_one_rank(results, logits, gradients):
    torch.testing.assert_close(torch.cat([result["logits"] for result in results]), logits)
    held = set()
    for rank, result in enumerate(results):
        held |= result["gradients"].keys()
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(
                gradient, gradients[name], msg=lambda m, n=name, r=rank: f"rank {r}, {n}: {m}"
            )
    assert held == gradients.keys()


CASES = {
    "even": {"ep": 4, "rows": 8, "sizes": {"experts": 8}},
    "uneven experts, uneven rows": {"ep": 4, "rows": 7, "sizes": {"experts": 6}},
    "ep 2 of 4 ranks": {"ep": 2, "rows": 6, "sizes": {"experts": 5, "count": 3}},
    "ep 1": {"ep": 1, "rows": 5, "sizes": {"experts": 3}},
    "top 1": {"ep": 4, "rows": 5, "sizes": {"experts": 5, "count": 1}},
    "every expert for every token": {"ep": 4, "rows": 4, "sizes": {"experts": 4, "count": 4}},
    "grouped-query heads": {"ep": 2, "rows": 5, "sizes": {"kv_heads": 2, "tie_embeddings": True}},
    "a rank to whose experts no token comes": {
        "ep": 4, "rows": 6, "sizes": {}, "away_from": (0, 1)},
    "all tokens to one rank": {
        "ep": 4, "rows": 6, "sizes": {"experts": 7, "count": 1}, "away_from": (0, 1, 2, 3, 5, 6)},
    "capacity": {"ep": 4, "rows": 6, "sizes": {}, "capacity": 0.7},
    "balance loss": {"ep": 2, "rows": 7, "sizes": {"experts": 5}, "balance": 0.3},
}


@pytest.mark.parametrize("name", CASES)
def test_n_ranks_equal_one_rank(ranks, name):
    case = CASES[name]
    results = ranks.run(one_pass, **case)
    assert_equal_to_one_rank(results, *alone(**{k: v for k, v in case.items() if k != "ep"}))


def test_three_ranks(three):
    for count in (3, 7):
        case = {"rows": 4, "sizes": {"experts": count, "layers": 1}}
        assert_equal_to_one_rank(three.run(one_pass, ep=3, **case), *alone(**case))


def layer_pass(lengths):
    """One layer on a rank with so many tokens, perhaps none: output, gradients."""
    mesh = make_mesh(dp=4, ep=4)
    layer = moe.moe_layers(experts.expert_parallel(make_model(), mesh.ep))[0]
    x = torch.randn(1, sum(lengths), 24, generator=torch.Generator().manual_seed(2)).double()
    x = x.split(lengths, dim=1)[mesh.ep.index].clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    mesh.close()
    named = layer.experts.named_parameters()
    return y.detach(), x.grad, {name: parameter.grad for name, parameter in named}


def test_a_rank_without_a_token(ranks):
    lengths = [5, 0, 7, 0]
    layer = moe.moe_layers(make_model())[0]
    x = torch.randn(1, 12, 24, generator=torch.Generator().manual_seed(2)).double()
    x.requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    outputs, inputs, gradients = zip(*ranks.run(layer_pass, lengths))
    torch.testing.assert_close(torch.cat(outputs, dim=1), y.detach())
    torch.testing.assert_close(torch.cat(inputs, dim=1), x.grad)
    for name, parameter in layer.experts.named_parameters():
        (gradient,) = [held[name] for held in gradients if name in held]
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_blocks(ranks, mode):
    case = {"rows": 5, "sizes": {"experts": 5}, "balance": 0.2}
    assert_equal_to_one_rank(ranks.run(one_pass, ep=4, mode=mode, **case), *alone(**case))


@pytest.mark.parametrize("name", ["uneven experts, uneven rows", "all tokens to one rank"])
def test_messages_and_bytes(ranks, name):
    case = CASES[name]
    results = ranks.run(one_pass, **case)
    count = case["sizes"]["experts"]
    held = experts.expert_shares(count, 4)
    for rank, result in enumerate(results):
        assert [op for op, *_ in result["events"]] == ["all_to_all"] * (3 * 2 + 2 * 2)
        expected = []
        for layer in range(2):
            loads = [other["loads"][layer][0] for other in results]
            first = sum(held[:rank])
            mine = slice(first, first + held[rank])
            choices, own = sum(loads[rank]), sum(loads[rank][mine])
            arrived = sum(sum(load[mine]) for load in loads)
            row = 24 * 8  # fp64
            expected += [
                (8 * count, 8 * (count - held[rank])),  # the counts
                (row * choices, row * (choices - own)),  # the tokens
                (row * arrived, row * (arrived - own)),  # the results
            ]
        tokens_and_results = [expected[1:3], expected[4:6]]
        for layer in (1, 0):  # backward: what came goes back, what went comes back
            there, back = tokens_and_results[layer]
            expected += [there, back]
        assert [(payload, sent) for _, payload, sent in result["events"]] == expected


def curve(ep, steps, sizes, rows=6):
    """Losses of training with SGD; dense gradients summed over dp, experts' over edp."""
    mesh = make_mesh(dp=dist.get_world_size(), ep=ep)
    model = experts.expert_parallel(make_model(**sizes), mesh.ep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(steps):
        x, y = rows_of(mesh.dp.index, mesh.dp.size, rows)
        loss = cross_entropy(model(x), y, reduction="sum") / (rows * 11)
        loss.backward()
        total = loss.detach().clone()
        if mesh.dp.group is not None:
            dist.all_reduce(total)
        for name, parameter in model.named_parameters():
            axis = mesh.edp if moe.is_expert(name) else mesh.dp
            if axis.group is not None:
                dist.all_reduce(parameter.grad, group=axis.group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    mesh.close()
    return losses


def curve_alone(steps, sizes, rows=6):
    model = make_model(**sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(steps):
        x, y = rows_of(0, 1, rows)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_learning_curve_is_that_of_one_rank(ranks, ep):
    sizes = {"experts": 6}
    expected = curve_alone(6, sizes)
    assert expected[-1] < 0.9 * expected[0]
    for losses in ranks.run(curve, ep, 6, sizes):
        assert losses == pytest.approx(expected, rel=1e-9)


def in_bf16():
    mesh = make_mesh(dp=4, ep=4)
    model = experts.expert_parallel(make_model().float(), mesh.ep)
    x, y = rows_of(mesh.dp.index, 4, 6)
    with torch.autocast("cpu", torch.bfloat16), Traffic() as traffic:
        logits = model(x)
        cross_entropy(logits, y).backward()
    mesh.close()
    return logits.detach().float(), [event.payload for event in traffic.events]


def test_under_autocast(ranks):
    results = ranks.run(in_bf16)
    exact, _ = alone(6, {})
    rounded = torch.cat([logits for logits, _ in results])
    # the mean: where two experts are nearly alike to the router, rounding may choose the other
    assert (rounded - exact).abs().mean() < 0.05 * exact.abs().mean()


def names_held(ep, count):
    mesh = make_mesh(dp=4, ep=ep)
    model = experts.expert_parallel(make_model(experts=count), mesh.ep)
    held = [int(name) for name in moe.moe_layers(model)[0].experts]
    dist.barrier()  # a rank that closes its groups would end others that still join them
    mesh.close()
    return mesh.ep.index, held


@pytest.mark.parametrize(("ep", "count"), [(4, 6), (2, 5), (4, 4)])
def test_each_expert_has_one_owner_and_keeps_its_number(ranks, ep, count):
    for index, held in ranks.run(names_held, ep, count):
        assert held == list(range(*share(count, index, ep)))


def test_shares():
    assert experts.expert_shares(7, 3) == (3, 2, 2)
    with pytest.raises(ValueError, match="2 experts cannot be shared out over 3 ranks"):
        experts.expert_shares(2, 3)


def without_experts():
    mesh = make_mesh(dp=4, ep=2)
    try:
        experts.expert_parallel(GPT(GPTConfig(**SMALL)), mesh.ep)
    except ValueError as error:
        return str(error)
    finally:
        dist.barrier()
        mesh.close()


def test_a_model_without_experts_is_refused(ranks):
    assert set(ranks.run(without_experts)) == {
        "--ep 2 shares out experts, and the model has none: add --experts"
    }
