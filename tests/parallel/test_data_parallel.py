"""What `utils.train` composes: loss scaling, ZeRO-1, FSDP2, clipping over shards, counted."""

import math

import pytest
import torch
import torch.distributed as dist

from utils.measure.traffic import Traffic
from utils.memory.precision import LossScaler, autocast, weight_format
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.parallel import full_tensor, zero
from utils.parallel.ddp import DDP
from utils.parallel.mesh import make_mesh
from utils.ranks import Ranks
from utils.shares import share
from utils.training.optimizer import make_optimizer

SMALL = GPTConfig(vocab_size=61, hidden_size=24, layers=2, heads=4, kv_heads=2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3, device="cpu") as group:
        yield group


def small_model(config=SMALL):
    torch.manual_seed(0)
    return GPT(config).double()


def rows_of(rank, size, count=7):
    tokens = torch.randint(61, (count, 12), generator=torch.Generator().manual_seed(1))
    first, stop = share(count, rank, size)
    return tokens[first:stop, :-1], tokens[first:stop, 1:]


def full_state(model):
    """{name: whole tensor} of every parameter; all ranks must call it."""
    named = model.named_parameters()
    return {name: full_tensor.full_tensor(p.detach(), p) for name, p in named}


def learn(model, x, y, tokens, ranks=1):
    (cross_entropy(model(x), y, reduction="sum") * (ranks / tokens)).backward()


# ---- precision


def test_precisions():
    assert weight_format("bf16") == weight_format("fp16") == torch.float32
    assert weight_format("fp64") == torch.float64
    a = torch.ones(2, 2)
    with autocast("bf16", "cpu"):
        assert (a @ a).dtype == torch.bfloat16
    with autocast("fp32", "cpu"):
        assert (a @ a).dtype == torch.float32


def scaled_steps(per_rank, spread=True):
    """Steps of an SGD on given gradients (steps x values), scaled as a backward pass would; the
    trace is (parameters, scale, stepped) after each step."""
    parameter = torch.zeros(per_rank.shape[1])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = LossScaler("fp16", CPU, initial=8.0, growth_interval=2)
    if not spread:
        scaler._spread_overflow = lambda gradients: None
    trace = []
    for gradient in per_rank:
        parameter.grad = scaler.scale(gradient)
        scaler.unscale_([parameter])
        stepped = scaler.step(optimizer)
        trace.append((parameter.tolist(), scaler.factor, stepped))
    return trace


def grad_scaler_steps(gradients):
    """The same with torch.amp.GradScaler alone."""
    parameter = torch.zeros(gradients.shape[1], requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    trace = []
    for gradient in gradients:
        parameter.grad = scaler.scale(gradient)
        before = parameter.tolist()
        scaler.step(optimizer)
        scaler.update()
        skipped = not gradient.isfinite().all()
        assert not skipped or parameter.tolist() == before
        trace.append((parameter.tolist(), scaler.get_scale(), not skipped))
    return trace


def gradients_with_overflow():
    """7 steps, 6 values: inf at step 2 in the part of the first of three ranks, NaN at 5 in the
    last's."""
    gradients = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    gradients[2, 1], gradients[5, 4] = math.inf, math.nan
    return gradients


def on_a_shard(spread):
    rank = dist.get_rank()
    return scaled_steps(gradients_with_overflow()[:, 2 * rank : 2 * rank + 2], spread)


def test_ranks_skip_together_as_grad_scaler_does_with_all_gradients(ranks):
    expected = grad_scaler_steps(gradients_with_overflow())
    assert [stepped for *_, stepped in expected] == [True, True, False, True, True, False, True]
    shards = ranks.run(on_a_shard, True)
    for step, (whole, scale, stepped) in enumerate(expected):
        assert [value for trace in shards for value in trace[step][0]] == whole
        assert {trace[step][1:] for trace in shards} == {(scale, stepped)}


def test_ranks_that_decide_alone_drift_apart(ranks):
    shards = ranks.run(on_a_shard, False)
    assert len({trace[-1][1] for trace in shards}) > 1  # other scales: the test above can see it


def test_a_scaler_goes_on_where_it_was():
    gradients = gradients_with_overflow()
    whole = scaled_steps(gradients)
    scaler = LossScaler("fp16", CPU, initial=8.0, growth_interval=2)
    parameter = torch.zeros(6)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for gradient in gradients[:2]:
        parameter.grad = scaler.scale(gradient)
        scaler.unscale_([parameter])
        scaler.step(optimizer)
    other = LossScaler("fp16", CPU, growth_interval=2)
    other.load_state_dict(scaler.state_dict())
    for number, gradient in enumerate(gradients[2:], start=2):
        parameter.grad = other.scale(gradient)
        other.unscale_([parameter])
        other.step(optimizer)
        assert (parameter.tolist(), other.factor) == whole[number][:2]


def test_other_precisions_are_not_scaled():
    scaler = LossScaler("bf16", CPU)
    assert scaler.scale(torch.tensor(3.0)).item() == 3.0 and scaler.state_dict() == {}
    scaler.load_state_dict({"scale": 4.0, "_growth_tracker": 1})
    assert scaler.factor == 1.0


# ---- data parallel


def accumulated(flag_after_forward=False):
    """Gradients of 3 micro-batches under DDP, and how often gradients travelled."""
    way = DDP([small_model()], make_mesh(dp=dist.get_world_size()), CPU)
    x, y = rows_of(dist.get_rank(), dist.get_world_size(), count=11)
    with Traffic() as traffic:
        for number in range(3):
            first, stop = share(len(x), number, 3)
            part, target = x[first:stop], y[first:stop]
            if flag_after_forward:
                loss = cross_entropy(way.module(part), target, reduction="sum") * (3 / (11 * 11))
                with way.micro_batch(last=number == 2):
                    loss.backward()
                continue
            with way.micro_batch(last=number == 2):
                learn(way.module, part, target, 11 * 11, ranks=3)
    gradients = {name: parameter.grad for name, parameter in way.named.items()}
    return gradients, traffic.calls("all_reduce")


def test_micro_batches_communicate_once(ranks):
    model = small_model()
    x, y = rows_of(0, 1, count=11)
    learn(model, x, y, y.numel())
    alone = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradients, calls in ranks.run(accumulated):
        torch.testing.assert_close(gradients, alone, rtol=1e-9, atol=1e-12)
        assert calls == 1
    assert all(calls == 3 for _, calls in ranks.run(accumulated, True))  # too late to take effect


# ---- ZeRO-1


def test_owners_share_nearly_equally():
    assert zero.owners([5, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1, 1]
    sizes = [parameter.numel() for parameter in small_model().parameters()]
    owner = zero.owners(sizes, 3)
    load = [sum(s for s, o in zip(sizes, owner) if o == rank) for rank in range(3)]
    assert max(load) - min(load) <= max(sizes) and len(owner) == len(sizes)


def zero_one_step(kind):
    model = small_model()
    x, y = rows_of(dist.get_rank(), dist.get_world_size())
    parts = zero.FlatParameters(model)
    optimizer = make_optimizer(parts.owned.items(), kind)
    tokens = 7 * 11
    with Traffic() as traffic:
        learn(model, x, y, tokens)
        parts.reduce_gradients()
        mine = {name: parameter.grad.clone() for name, parameter in parts.owned.items()}
        optimizer.step()
        parts.gather_parameters()
    parts.zero_grad()
    assert not any(parameter.grad.any() for parameter in model.parameters())
    width = parts.parameters.shape[1]
    parts.release()
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    states = sum(state.numel() for state in optimizer.named_state().values())
    sent = [(event.op, event.payload) for event in traffic.events]
    return mine, values, states, sent, width


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_zero_one_equals_one_rank(ranks, kind):
    model = small_model()
    optimizer = make_optimizer(model, kind)
    x, y = rows_of(0, 1)
    learn(model, x, y, y.numel())
    alone = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    results = ranks.run(zero_one_step, kind)
    owned = {name: gradient for mine, *_ in results for name, gradient in mine.items()}
    torch.testing.assert_close(owned, alone, rtol=1e-9, atol=1e-12)
    for _, values, _, sent, width in results:
        expected = dict(model.named_parameters())
        torch.testing.assert_close(values, {n: p.detach() for n, p in expected.items()})
        assert sent == [("reduce_scatter", 3 * width * 8), ("all_gather", width * 8)]
    states = sum(state.numel() for state in optimizer.named_state().values())
    assert sum(result[2] for result in results) == states  # nothing is kept twice


def too_many_ranks():
    zero.FlatParameters(torch.nn.Linear(2, 2))


def test_more_ranks_than_parameters_are_refused(ranks):
    with pytest.raises(Exception, match="3 ranks cannot share 2 parameters, each of which has one"):
        ranks.run(too_many_ranks)


# ---- ZeRO-2 and 3


def fsdp_gradients(level, tie):
    config = GPTConfig(**{**SMALL.__dict__, "tie_embeddings": tie})
    model = zero.shard(small_model(config), level, CPU)
    x, y = rows_of(dist.get_rank(), dist.get_world_size())
    with Traffic() as traffic:
        learn(model, x, y, 7 * 11, ranks=3)
    named = list(model.named_parameters())
    parts = sum(parameter.to_local().numel() for _, parameter in named)
    gathered = {
        name: full_tensor.full_tensor(parameter.grad, parameter) for name, parameter in named
    }
    local = full_tensor.local_shards(dict(named).values())
    norms = [full_tensor.clip_gradients(local, 0.0, CPU, how).item() for how in (local, None)]
    return gathered, parts, traffic.calls("all_gather"), traffic.calls("reduce_scatter"), norms


@pytest.mark.parametrize("level, tie", [(2, False), (3, False), (3, True)])
def test_fsdp_gives_the_gradient_of_the_whole_batch(ranks, level, tie):
    model = small_model(GPTConfig(**{**SMALL.__dict__, "tie_embeddings": tie}))
    x, y = rows_of(0, 1)
    learn(model, x, y, y.numel())
    alone = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in alone.values()])).item()
    results = ranks.run(fsdp_gradients, level, tie)
    for gathered, _, gathers, reduces, (together, own) in results:
        torch.testing.assert_close(gathered, alone, rtol=1e-9, atol=1e-12)
        units = 2 + (1 if tie else 2)  # blocks; embedding; norm and lm_head
        again = 0 if level == 2 else units - 1  # all but the last unit
        assert (gathers, reduces) == (units + again, units)
        assert together == pytest.approx(norm, rel=1e-9)
        assert own < 0.9 * norm  # a rank that clips by its own part's norm clips too little
    assert sum(parts for _, parts, *_ in results) == model.parameter_count()


def muon_steps(muon, level):
    model = small_model()
    rank, size = (dist.get_rank(), dist.get_world_size()) if level else (0, 1)
    if level:
        zero.shard(model, level, CPU)
    optimizer = make_optimizer(model, "muon", weight_decay=0.3, muon=muon)
    x, y = rows_of(rank, size)
    for _ in range(3):
        learn(model, x, y, 7 * 11, ranks=size)
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: whole.clone() for name, whole in full_state(model).items()}
    momenta = [s["momentum_buffer"] for s in optimizer.parts[0].state.values()]
    return parameters, sum(full_tensor.local_shards([m])[0].numel() for m in momenta)


@pytest.mark.parametrize("level", [2, 3])
def test_muon_on_split_matrices_is_muon_on_whole_ones(ranks, level):
    alone, momenta = muon_steps(torch.optim.Muon, 0)
    results = ranks.run(muon_steps, zero.ShardedMuon, level)
    torch.testing.assert_close(results[0][0], alone, rtol=1e-9, atol=1e-12)
    assert sum(held for _, held in results) == momenta  # each rank keeps its part of the momentum


def round_trip():
    model = zero.shard(small_model(), 3, CPU)
    named = dict(model.named_parameters())
    whole = full_state(model)
    same = []
    for name, parameter in named.items():
        part = full_tensor.shard_of(whole[name], parameter)
        same.append(torch.equal(part.to_local(), parameter.to_local()))
        plain = full_tensor.full_tensor(
            part.to_local(), parameter
        )  # a plain tensor of the same part
        same.append(torch.equal(plain, whole[name]))
    return all(same), {name: tensor.sum().item() for name, tensor in whole.items()}


def test_parts_and_wholes(ranks):
    sums = {name: parameter.sum().item() for name, parameter in small_model().named_parameters()}
    for same, theirs in ranks.run(round_trip):
        assert same and theirs == sums
