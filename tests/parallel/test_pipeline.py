"""A pipeline computes what one rank computes and keeps what the simulator predicts."""

import copy
import itertools
import time

import pytest
import torch
import torch.distributed as dist

from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.parallel.mesh import Axis, make_mesh, one_rank
from utils.parallel.pipeline import Pipeline
from utils.parallel.schedules import Action, schedule
from utils.parallel.stages import (
    SleepingStage,
    make_stages,
    measured_costs,
    partition,
    reduce_tied_gradients,
    sleeping_micro_batches,
)
from utils.parallel.zero_bubble import WeightGradientsLater
from utils.ranks import RankError, Ranks

SMALL = GPTConfig(
    vocab_size=61, hidden_size=16, layers=5, heads=4, kv_heads=2, intermediate_size=24
)
TIED = GPTConfig(
    vocab_size=61, hidden_size=16, layers=6, heads=4, tie_embeddings=True, attention_bias=True
)
SCHEDULES = [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]
SEQ = 6


def model_of(config, dtype=torch.float64):
    torch.manual_seed(0)
    return GPT(config).to(dtype)


def micro_batches(rows):
    """[(x, y)] with these numbers of rows."""
    tokens = torch.randint(61, (sum(rows), SEQ + 1), generator=torch.Generator().manual_seed(1))
    return [(part[:, :-1], part[:, 1:]) for part in tokens.split(rows)]


def summed(logits, y):
    return cross_entropy(logits, y, reduction="sum") / 100


def alone(config, rows):
    """Return (loss, {name: gradient}) on one rank, all rows at once."""
    model = model_of(config)
    x, y = (torch.cat(parts) for parts in zip(*micro_batches(rows), strict=True))
    loss = summed(model(x), y)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def owned_parameters(stages, axis):
    """{name: parameter} of this rank's stages, without the last rank's copy of a tied matrix."""
    owned = {}
    for stage in stages:
        tied = axis.size > 1 and stage.config.tie_embeddings and stage.is_last
        copy_of_tied = stage.lm_head.weight if tied else None
        for name, parameter in stage.named_parameters():
            if parameter is not copy_of_tied:
                owned.setdefault(parameter, name)
    return {name: parameter for parameter, name in owned.items()}


def on_pipeline(config, rows, name, chunks, layers=None):
    """Run a pipeline over all ranks; return (loss, gradients that this rank owns)."""
    mesh = make_mesh(pp=dist.get_world_size())
    model = model_of(config)
    stages = make_stages(model, mesh.pp, chunks, layers)
    pipeline = Pipeline(stages, mesh.pp, name, summed)
    loss = pipeline.run(micro_batches(rows))
    reduce_tied_gradients(stages, mesh.pp)
    gradients = {name: p.grad for name, p in owned_parameters(stages, mesh.pp).items()}
    mesh.close()
    return loss.item(), gradients


def assert_equal_to_one_rank(results, config, rows):
    loss, expected = alone(config, rows)
    found = {}
    for other, gradients in results:
        assert other == pytest.approx(loss, rel=1e-12)
        assert not set(gradients) & set(found), "a parameter has two owners"
        found |= gradients
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.fixture(scope="module")
def pools():
    with Ranks(2, device="cpu") as two, Ranks(3, device="cpu") as three:
        yield {2: two, 3: three}


# ---- equal to one rank


@pytest.mark.parametrize("name, chunks", SCHEDULES)
@pytest.mark.parametrize("size", [2, 3])
def test_ragged_micro_batches_and_uneven_layers(pools, size, name, chunks):
    """Five layers on up to 4 stages, six on 6; five uneven micro-batches, then a single one."""
    config = SMALL if size * chunks <= 5 else TIED
    for rows in ([3, 1, 2, 2, 1], [2]):
        results = pools[size].run(on_pipeline, config, rows, name, chunks)
        assert_equal_to_one_rank(results, config, rows)


def test_layers_of_ones_choice(pools):
    layers = [range(0, 1), range(1, 5)]
    results = pools[2].run(on_pipeline, SMALL, [2, 1], "1f1b", 1, layers)
    assert_equal_to_one_rank(results, SMALL, [2, 1])
    assert "model.layers.1.mlp.up_proj.weight" in results[1][1]


# ---- micro-batches in flight


def most_kept(name, chunks):
    """The most micro-batches whose inputs a rank keeps at once; a chunk counts as 1/chunks."""
    mesh = make_mesh(pp=dist.get_world_size())
    stages = make_stages(model_of(TIED), mesh.pp, chunks)
    pipeline = Pipeline(stages, mesh.pp, name, summed)
    alive, peak = [0], [0]
    for stage in stages:
        stage.register_forward_hook(lambda *_: alive.__setitem__(0, alive[0] + 1))
    pipeline.before_backward = lambda *_: (
        peak.__setitem__(0, max(peak[0], alive[0])),
        alive.__setitem__(0, alive[0] - 1),
    )
    pipeline.run(micro_batches([1] * 7))
    mesh.close()
    return peak[0] / chunks


@pytest.mark.parametrize("name, chunks", SCHEDULES[:4])
def test_what_is_in_flight_is_what_the_simulator_says(pools, name, chunks):
    from utils.parallel.schedules import in_flight

    assert tuple(pools[3].run(most_kept, name, chunks)) == in_flight(schedule(name, 3, 7, chunks))


def timeline(name):
    mesh = make_mesh(pp=dist.get_world_size())
    stages = make_stages(model_of(SMALL), mesh.pp)
    pipeline = Pipeline(stages, mesh.pp, name, summed)
    pipeline.run(micro_batches([1] * 4))
    mesh.close()
    return pipeline.events


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_events_tell_what_happened(pools, name):
    logs = pools[3].run(timeline, name)
    for events, order in zip(logs, schedule(name, 3, 4), strict=True):
        assert [Action(*event[:3]) for event in events if event.kind != "wait"] == order
        assert all(event.begin <= event.end for event in events)
        assert all(a.end <= b.begin for a, b in itertools.pairwise(events))
    ends = {(r, *e[:2]): e.end for r, events in enumerate(logs) for e in events}
    begins = {(r, *e[:2]): e.begin for r, events in enumerate(logs) for e in events}
    for number in range(4):
        assert begins[0, "F", number] < begins[1, "F", number] < ends[2, "F", number]


def test_waiting_stages_wait_in_every_action():
    stages = [SleepingStage(forward=0.004, backward=0.01, weight=0.006)]
    pipeline = Pipeline(
        stages, one_rank().pp, "zero-bubble", SleepingStage.loss, boundary=SleepingStage.boundary
    )
    assert pipeline.run(sleeping_micro_batches(3)).item() == 3
    seconds = dict.fromkeys("FBW", 0.0)
    for event in pipeline.events:
        seconds[event.kind] += event.end - event.begin
    assert seconds["F"] >= 0.012 and seconds["B"] >= 0.012 and seconds["W"] >= 0.018
    assert stages[0].scale.grad == 3


# ---- partitioning


def test_partition_levels_the_slowest_stage():
    assert partition([1] * 7, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 7)]
    assert partition([1] * 4, 4, last=1) == [range(n, n + 1) for n in range(4)]
    assert partition([1] * 8, 4, last=2) == [range(0, 3), range(3, 5), range(5, 7), range(7, 8)]
    assert partition([5, 1, 1, 1], 2) == [range(0, 1), range(1, 4)]
    with pytest.raises(ValueError, match="3 layers cannot fill 4 stages"):
        partition([1] * 3, 4)


def test_partition_is_as_good_as_trying_all():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        costs = torch.rand(7, generator=generator).tolist()
        first, last = torch.rand(2, generator=generator).tolist()

        def slowest(cuts, costs=costs, first=first, last=last):
            ends = [0, *cuts, 7]
            sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
            sums[0], sums[-1] = sums[0] + first, sums[-1] + last
            return max(sums)

        found = partition(costs, 3, first, last)
        best = min(itertools.combinations(range(1, 7), 2), key=slowest)
        assert slowest([part.stop for part in found[:-1]]) == pytest.approx(slowest(best))


def test_measured_costs_change_nothing():
    model = model_of(SMALL, torch.float32)
    first, layers, last = measured_costs(model, micro_batches([2])[0][0], repeats=2)
    assert len(layers) == SMALL.layers and min(first, last, *layers) > 0
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- stages


def test_stages_are_the_models_own_parts():
    model = GPT.without_memory(TIED)
    axis = Axis("pp", (4, 6), 1, None)
    stages = make_stages(model, axis, chunks=2)
    assert [list(dict(s.model.layers.named_children())) for s in stages] == [["2", "3"], ["5"]]
    assert stages[0].model.layers[0] is model.model.layers[2]
    named = dict(model.named_parameters())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter is named.get(name, model.lm_head.weight)
    assert "lm_head.weight" not in owned_parameters(stages, axis)
    copied = copy.deepcopy(stages[0])
    assert list(copied.state_dict()) == list(stages[0].state_dict())


def test_layers_must_be_complete():
    model = model_of(SMALL)
    with pytest.raises(ValueError, match="are not 1 stages that hold each of 5 layers once"):
        make_stages(model, one_rank().pp, layers=[range(4)])
    with pytest.raises(ValueError, match="5 layers cannot fill 6 stages"):
        make_stages(model, one_rank().pp, chunks=6)


# ---- deferred weight gradients


def test_weight_gradients_wait():
    torch.manual_seed(0)
    layer, norm = torch.nn.Linear(3, 4), torch.nn.LayerNorm(3)
    x = torch.randn(2, 5, 3, requires_grad=True)
    layer(norm(x)).square().sum().backward()
    expected = [x.grad, layer.weight.grad, layer.bias.grad, norm.weight.grad]
    x.grad = None
    layer.zero_grad()
    norm.zero_grad()
    for _ in range(2):
        with WeightGradientsLater() as later:
            y = layer(norm(x)).square().sum()
        y.backward()
    assert layer.bias.grad is None and torch.equal(x.grad, 2 * expected[0])
    later.add()
    found = [x.grad / 2, layer.weight.grad, layer.bias.grad, norm.weight.grad / 2]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not later.waiting


def test_weight_gradients_wait_under_autocast():
    layer = torch.nn.Linear(3, 4)
    x = torch.randn(2, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    with WeightGradientsLater() as later, torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    later.add()
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, expected, rtol=0.02, atol=0.02)


# ---- errors


def test_what_cannot_run_is_refused_before_it_begins():
    stages = make_stages(model_of(SMALL), one_rank().pp)
    wrong = Pipeline(stages, one_rank().pp, [[Action("B", 0), Action("F", 0)]], summed)
    with pytest.raises(ValueError, match="deadlock"):
        wrong.run(micro_batches([1]))
    two = Pipeline(stages, one_rank().pp, schedule("gpipe", 1, 2), summed)
    with pytest.raises(ValueError, match="1 chunks and 2 micro-batches, but there are 1, 1 and 1"):
        two.run(micro_batches([1]))


def wrong_type():
    mesh = make_mesh(pp=2)
    stages = make_stages(model_of(SMALL).bfloat16(), mesh.pp)
    boundary = lambda x: ((*x.shape, 16), x.dtype)  # noqa: E731
    pipeline = Pipeline(stages, mesh.pp, "1f1b", summed, boundary=boundary)
    pipeline.run(micro_batches([1]))


def late():
    """Let rank 0 take longer than rank 1 waits; return this rank's error."""
    mesh = make_mesh(pp=2)
    stages = make_stages(model_of(SMALL), mesh.pp)
    if dist.get_rank() == 0:
        stages[0].register_forward_hook(lambda *_: time.sleep(1.5))
    try:
        Pipeline(stages, mesh.pp, "1f1b", summed, timeout=0.3).run(micro_batches([1]))
    except RuntimeError as error:
        return str(error)


def test_errors_name_the_message():
    with Ranks(2, device="cpu") as ranks:
        with pytest.raises(RankError, match=r"bfloat16 to send for F0.*expects.*int64.*boundary="):
            ranks.run(wrong_type)
        assert "waited for F0 of rank 0" in ranks.run(late)[1]
