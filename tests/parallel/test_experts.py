"""Expert parallelism: N ranks match one, however experts are placed; messages are counted."""

import pytest
import torch
import torch.distributed as dist

from tests.models.small_models import random_model
from utils.measure.traffic import Traffic
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
    with Ranks(3, device="cpu") as group:
        yield group


def make_model(experts=6, count=2, **changes):
    config = GPTConfig(**{**SMALL, "experts": experts, "experts_per_token": count, **changes})
    return random_model(config, dtype=torch.float64)


def rows_of(rank, size, count):
    tokens = torch.randint(61, (count, 12), generator=torch.Generator().manual_seed(1))
    first, stop = share(count, rank, size)
    return tokens[first:stop, :-1], tokens[first:stop, 1:]


def learn(model, x, y):
    logits = model(x)
    cross_entropy(logits, y, reduction="sum").backward()
    return logits.detach()


def crowd(model, away_from):
    """Keep all tokens away from these experts."""
    for layer in moe.moe_layers(model):
        layer.bias = torch.zeros(layer.count)
        layer.bias[list(away_from)] = -9.0


def one_pass(rows, sizes, away_from=(), capacity=None):
    """This rank's logits, gradients (dense ones summed over all ranks) and traffic."""
    mesh = make_mesh(dp=dist.get_world_size(), ep=dist.get_world_size())
    model = experts.expert_parallel(make_model(**sizes), mesh.ep)
    crowd(model, away_from)
    for layer in moe.moe_layers(model):
        layer.capacity_factor = capacity
    x, y = rows_of(mesh.dp.index, mesh.dp.size, rows)
    with Traffic() as traffic:
        logits = learn(model, x, y)
    gradients = {}
    for name, parameter in model.named_parameters():
        if not moe.is_expert(name):
            dist.all_reduce(parameter.grad)
        gradients[name] = parameter.grad
    loads = [(layer.counts.tolist(), layer.dropped) for layer in moe.moe_layers(model)]
    events = [(event.op, event.payload, int(event.sent)) for event in traffic.events]
    mesh.close()
    return {"logits": logits, "gradients": gradients, "loads": loads, "events": events}


def alone(rows, sizes, away_from=(), capacity=None):
    model = make_model(**sizes)
    crowd(model, away_from)
    for layer in moe.moe_layers(model):
        layer.capacity_factor = capacity
    logits = learn(model, *rows_of(0, 1, rows))
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


CASES = {  # what tests/training/test_mixes.py does not cover
    "uneven experts, uneven rows": {"rows": 7, "sizes": {"experts": 5}},
    "every expert for every token": {"rows": 4, "sizes": {"experts": 4, "count": 4}},
    "a rank to whose experts no token comes": {"rows": 6, "sizes": {}, "away_from": (0, 1)},
    "all tokens to one rank": {
        "rows": 6, "sizes": {"experts": 7, "count": 1}, "away_from": (0, 1, 2, 3, 5, 6)},
    "capacity": {"rows": 6, "sizes": {}, "capacity": 0.7},
}


@pytest.mark.parametrize("name", CASES)
def test_n_ranks_equal_one_rank(ranks, name):
    assert_equal_to_one_rank(ranks.run(one_pass, **CASES[name]), *alone(**CASES[name]))


def layer_pass(lengths):
    """Run a layer on this rank's share of the tokens, possibly empty; return output, gradients."""
    mesh = make_mesh(dp=3, ep=3)
    layer = moe.moe_layers(experts.expert_parallel(make_model(), mesh.ep))[0]
    x = torch.randn(1, sum(lengths), 24, generator=torch.Generator().manual_seed(2)).double()
    x = x.split(lengths, dim=1)[mesh.ep.index].clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    mesh.close()
    named = layer.experts.named_parameters()
    return y.detach(), x.grad, {name: parameter.grad for name, parameter in named}


def test_a_rank_without_a_token(ranks):
    lengths = [5, 0, 7]
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


@pytest.mark.parametrize("name", ["uneven experts, uneven rows", "all tokens to one rank"])
def test_messages_and_bytes(ranks, name):
    case = CASES[name]
    results = ranks.run(one_pass, **case)
    count = case["sizes"]["experts"]
    held = experts.expert_shares(count, 3)
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
        for layer in (1, 0):  # backward: the same in reverse
            there, back = tokens_and_results[layer]
            expected += [there, back]
        assert [(payload, sent) for _, payload, sent in result["events"]] == expected


def names_held(count):
    mesh = make_mesh(dp=3, ep=3)
    model = experts.expert_parallel(make_model(experts=count), mesh.ep)
    held = [int(name) for name in moe.moe_layers(model)[0].experts]
    dist.barrier()  # closing groups early would break ranks that still join them
    mesh.close()
    return mesh.ep.index, held


def test_each_expert_has_one_owner_and_keeps_its_number(ranks):
    for index, held in ranks.run(names_held, 7):
        assert held == list(range(*share(7, index, 3)))


def test_shares():
    assert experts.expert_shares(7, 3) == (3, 2, 2)
    with pytest.raises(ValueError, match="2 experts cannot be split over 3 ranks"):
        experts.expert_shares(2, 3)


def without_experts():
    mesh = make_mesh(dp=3, ep=3)
    try:
        experts.expert_parallel(GPT(GPTConfig(**SMALL)), mesh.ep)
    except ValueError as error:
        return str(error)
    finally:
        dist.barrier()
        mesh.close()


def test_a_model_without_experts_is_refused(ranks):
    assert set(ranks.run(without_experts)) == {
        "--ep 3 splits experts, but the model has none: add --experts"
    }
