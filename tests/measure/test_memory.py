"""Memory is exact to the byte: against counts by hand, autograd and the profiler.

The profiler's `[memory]` events come from the allocator itself: an independent reference.
"""

import json
import os
import time

import pytest
import torch
from torch import nn

from tests.patience import patience
from utils.measure import timing
from utils.measure.memory import KINDS, Memory
from utils.memory.checkpointing import recompute
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.ranks import Ranks
from utils.training.optimizer import make_optimizer

FLOAT = 4  # bytes of a float32


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def small_gpt(layers=2):
    torch.manual_seed(0)
    model = GPT(GPTConfig(hidden_size=32, layers=layers, heads=4, kv_heads=2))
    tokens = torch.randint(0, 256, (3, 17))
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained_gpt():
    """(model, x, y, optimizer, step) after one `step`, which makes the optimizer's state."""
    model, x, y = small_gpt()
    optimizer = make_optimizer(model, "adamw")

    def step():
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, x, y, optimizer, step


def total(held):
    return sum(held.values())


# ---- against counts by hand


@pytest.mark.parametrize("fused", [False, True])
def test_a_small_chain_is_what_a_hand_count_says(fused):
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5))
    parameters = (10 * 20 + 20) + (20 * 5 + 5)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    x = torch.randn(7, 10)
    with Memory(model, optimizer) as memory:
        with memory.phase("forward"):
            loss = model(x).square().mean()
        # Linear saves its input, tanh its output (the next input), square its input
        saved = 7 * 10 + 7 * 20 + 7 * 5
        held = dict.fromkeys(KINDS, 0) | {"parameters": parameters * FLOAT}
        assert memory.now() == held | {"activations": (saved + 1) * FLOAT}  # and the loss itself
        with memory.phase("backward"):
            loss.backward()
        del loss
        held |= {"gradients": parameters * FLOAT, "activations": 7 * 10 * FLOAT}  # x is still there
        assert memory.now() == held
        with memory.phase("optimizer"):
            optimizer.step()
        assert memory.now() == held | {"optimizer": (2 * parameters + 4) * FLOAT}  # 4 step counters
        optimizer.zero_grad()
        assert memory.now()["gradients"] == 0
        del x
        assert memory.now()["activations"] == 0
    assert memory.phases["backward"]["gradients"] > 0


def test_forward_peak_of_a_chain_by_hand():
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    with Memory(model) as memory, memory.phase("forward"):
        model(torch.ones(5, 8))  # its output is freed at once
    rows = 5 * 8 * FLOAT
    # the input of each layer is saved, and the last output is still held
    assert memory.phases["forward"] == dict.fromkeys(KINDS, 0) | {
        "parameters": 3 * 8 * 8 * FLOAT,
        "temporary": 4 * rows,  # without a backward pass, none was an activation
    }


def test_views_and_changes_in_place_count_once():
    with Memory(device="cpu") as memory:
        x = torch.zeros(100)
        views = [x[:50], x.view(10, 10), x.expand(7, 100)]
        x.add_(1).mul_(2)
        assert total(memory.now()) == 400
        del x
        assert total(memory.now()) == 400  # the views hold it
        del views
        assert total(memory.now()) == 0
    assert memory.peak_bytes == 400


def test_a_resized_storage_counts_with_its_size_of_today():
    model = nn.Linear(10, 10, bias=False)
    storage = model.weight.untyped_storage()
    with Memory(model) as memory:
        storage.resize_(0)
        assert memory.now()["parameters"] == 0
        torch.ones(1)
        storage.resize_(400)
        assert memory.now()["parameters"] == 400


def test_memory_mapped_tensors_and_other_devices_do_not_count(tmp_path):
    with Memory(device="cpu") as memory:
        mapped = torch.from_file(str(tmp_path / "file"), shared=True, size=1000)
        mapped += 1
        elsewhere = torch.empty(1000, device="meta")
        elsewhere += 1
        assert total(memory.now()) == 0


def test_master_weights_count_as_the_optimizers():
    model = nn.Linear(10, 10, bias=False).bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    with Memory(model, optimizer) as memory:
        masters[0].grad = torch.ones(10, 10)
        optimizer.step()
        held = memory.now()
    assert (held["parameters"], held["gradients"], held["optimizer"]) == (200, 400, 1200 + FLOAT)


def test_several_optimizers_in_one():
    model, x, y = small_gpt()
    optimizer = make_optimizer(model, "muon")
    with Memory(model, optimizer) as memory:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        held = memory.now()
    assert held["optimizer"] == bytes_of(optimizer.named_state().values())
    assert held["gradients"] == held["parameters"] == bytes_of(model.parameters())


# ---- against autograd's own list of what it saves


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_are_what_autograd_saves(mode):
    model, x, y = small_gpt()
    recompute(model, mode)
    saved = timing.saved_bytes(lambda: cross_entropy(model(x), y), list(model.parameters()))
    with Memory(model) as memory:
        loss = cross_entropy(model(x), y)
        assert memory.now()["activations"] == saved + loss.nbytes  # `saved` includes x and y


def test_under_autocast_the_copies_of_the_weights_are_activations_too():
    model, x, y = small_gpt()

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        return cross_entropy(logits, y)

    saved = timing.saved_bytes(forward, list(model.parameters()))
    with Memory(model) as memory:
        loss = forward()
        assert memory.now()["activations"] == saved + loss.nbytes


def test_recomputed_activations_are_activations_again():
    model, x, y = small_gpt(layers=4)
    plain = timing.saved_bytes(lambda: cross_entropy(model(x), y), list(model.parameters()))
    kept = {}
    for mode in ("none", "full", "selective"):
        recompute(model, mode)
        with Memory(model) as memory:
            with memory.phase("forward"):
                loss = cross_entropy(model(x), y)
            after = memory.now()["activations"] - loss.nbytes
            with memory.phase("backward"):
                loss.backward()
            model.zero_grad()
        kept[mode] = (after, max(held["activations"] for _, held in memory.timeline))
    assert kept["none"][0] == plain
    inner = bytes_of([torch.empty(3, 16, 32)])
    rows = kept["full"][0] - 4 * inner  # without the layers' inputs: the head's tensors
    one_layer = (plain - rows) / 4
    assert 0 < rows < plain / 2
    # at the peak: the inputs of all layers, and the tensors of the layer being recomputed
    assert kept["full"][1] < rows + 4 * inner + 1.1 * one_layer
    assert kept["full"][1] > one_layer
    assert kept["full"][0] < kept["selective"][0] < kept["none"][0]


# ---- against the allocator: the profiler's memory events


def events_of_the_allocator(function, path):
    """Bytes allocated (positive) or freed, in order, while `function()` runs."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(profile_memory=True) as trace:
        function()
    trace.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "[memory]"]
    return [e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"])]


def test_the_peak_of_a_step_is_the_allocators(tmp_path):
    model, x, y, optimizer, step = trained_gpt()
    changes = events_of_the_allocator(step, tmp_path / "trace.json")
    held = highest = 0
    for change in changes:
        held += change
        highest = max(highest, held)
    with Memory(model, optimizer) as memory:
        step()
    state = bytes_of(model.parameters()) + bytes_of(optimizer.named_state().values())
    ours = memory.peak_bytes - state - bytes_of([x, y])
    assert ours <= highest <= 1.05 * ours  # misses operators' workspaces, small here


def test_what_stays_after_a_forward_pass_is_the_allocators(tmp_path):
    model, x, y = small_gpt()
    kept = []
    changes = events_of_the_allocator(
        lambda: kept.append(cross_entropy(model(x), y)), tmp_path / "trace.json"
    )
    kept.clear()
    with Memory(model) as memory:
        kept.append(cross_entropy(model(x), y))
        held = memory.now()
    assert held["activations"] + held["temporary"] - bytes_of([x, y]) == sum(changes)


def test_the_peak_of_a_step_is_that_of_torchs_own_tracker():
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker()
    model, _, y, optimizer, step = trained_gpt()
    tracker.track_external(model, *optimizer.parts)
    with tracker:
        step()
    (theirs,) = tracker.get_tracker_snapshot("peak").values()
    theirs = {getattr(kind, "value", kind): size for kind, size in theirs.items()}
    with Memory(model, optimizer) as memory:
        step()
    assert memory.peak_bytes - y.nbytes == theirs["Total"]  # it includes the modules' input x
    kinds = {"parameters": "Parameter", "gradients": "Gradient", "optimizer": "Optstate"}
    assert {kind: memory.peak[kind] for kind in kinds} == {k: theirs[v] for k, v in kinds.items()}
    assert abs(memory.peak["activations"] - y.nbytes - theirs["Activation"]) <= 4  # the loss


# ---- on ranks


def settled(memory, communication, seconds=20):
    """The bytes held when the backend's threads have released the last messages, down to
    `communication`."""
    deadline = time.monotonic() + patience(seconds)
    while memory.now()["communication"] > communication and time.monotonic() < deadline:
        time.sleep(0.02)
    return memory.now()


def of_ddp(as_view):
    from torch.nn.parallel import DistributedDataParallel

    model, x, y = small_gpt()
    with Memory(model, device="cpu") as memory:
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        for _ in range(2):  # after its first step DDP rebuilds its buckets
            model.zero_grad()
            cross_entropy(parallel(x), y).backward()
        whole = bytes_of(model.parameters())
        return settled(memory, 0 if as_view else whole), whole


def of_fsdp(layers):
    from torch.distributed.fsdp import fully_shard

    model, x, y = small_gpt(layers)
    whole, one = bytes_of(model.parameters()), bytes_of(model.model.layers[0].parameters())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with Memory(model, optimizer) as memory:
        for _ in range(2):
            with memory.phase("forward"):
                loss = cross_entropy(model(x), y)
            with memory.phase("backward"):
                loss.backward()
            after = memory.now()
            with memory.phase("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
            del loss
        return settled(memory, 0), after, memory.phases, whole, one


def of_lone_layers():
    """The most bytes of parameters in a step on units without submodules."""
    from torch.distributed.fsdp import fully_shard

    layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(3)])
    for unit in (*layers, layers):
        fully_shard(unit)
    with Memory(layers) as memory:
        layers(torch.ones(2, 8)).sum().backward()
    return max(held["parameters"] for _, held in memory.timeline)


def test_ddp_buckets_are_communication_and_fsdp_holds_shards():
    with Ranks(2, device="cpu") as ranks:
        for held, whole in ranks.run(of_ddp, False):
            assert held["gradients"] == held["communication"] == held["parameters"] == whole
        for held, whole in ranks.run(of_ddp, True):
            assert held["gradients"] == whole and held["communication"] == 0
        for now, after, phases, whole, one in ranks.run(of_fsdp, 3):
            assert now["parameters"] == after["gradients"] == whole / 2
            assert now["optimizer"] >= whole and now["communication"] == 0
            outer = whole - 3 * one  # embedding, head and last norm stay gathered
            most = max(phases["forward"]["parameters"], phases["backward"]["parameters"])
            assert whole / 2 < most <= whole / 2 + outer + 2 * one  # one layer and the next
            assert phases["backward"]["communication"] > 0
        one = 4 * 8 * 8  # bytes per layer: this rank's half of three, and a gathered one
        assert ranks.run(of_lone_layers) == [3 * one / 2 + one] * 2


# ---- bookkeeping


def test_the_timeline_ends_where_now_is_and_peaks_where_peak_is():
    model, x, y = small_gpt()
    with Memory(model) as memory:
        with memory.phase("forward"):
            loss = cross_entropy(model(x), y)
        with memory.phase("backward"):
            loss.backward()
    rows = memory.timeline
    assert rows[-1][1] == memory.now()
    assert max(total(held) for _, held in rows) == memory.peak_bytes == total(memory.peak)
    assert list(memory.phases) == ["forward", "backward"]
    assert all(total(held) <= memory.peak_bytes for held in memory.phases.values())
    assert all(value >= 0 for _, held in rows for value in held.values())
    assert "backward" in str(memory) and f"{memory.peak['parameters']:,}" in str(memory)


def test_micro_batches_take_the_same_room_one_after_the_other():
    model, x, y = small_gpt()
    kept = []
    with Memory(model) as memory:
        for _ in range(3):
            with memory.phase("forward"):
                loss = cross_entropy(model(x), y)
            kept.append(memory.now())
            with memory.phase("backward"):
                loss.backward()
            del loss
    assert kept[0]["activations"] == kept[1]["activations"] == kept[2]["activations"]
    assert kept[0]["gradients"] == 0 and kept[1]["gradients"] == kept[2]["gradients"] > 0


def test_watching_changes_nothing():
    model, x, y = small_gpt()
    cross_entropy(model(x), y).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with Memory(model):
        cross_entropy(model(x), y).backward()
    assert all(p.grad.equal(g) for p, g in zip(model.parameters(), plain, strict=True))
    with Memory(model), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x = torch.ones(3, requires_grad=True) * 1
        y = x.exp()
        y += 1
        y.sum().backward()


def test_an_error_inside_leaves_nothing_behind():
    model, x, y = small_gpt()
    with pytest.raises(ZeroDivisionError), Memory(model) as memory:
        _ = 1 / 0
    before = len(memory.timeline)
    with pytest.raises(RuntimeError, match="make a new one"), memory:
        pass
    cross_entropy(model(x), y).backward()
    assert len(memory.timeline) == before
    assert memory.now() == dict.fromkeys(KINDS, 0) | {"parameters": bytes_of(model.parameters())}
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_past_its_limit_a_step_ends_with_what_is_held_by_kind():
    model, _, _, optimizer, step = trained_gpt()
    with Memory(model, optimizer) as memory:
        step()
    with Memory(model, optimizer, limit=memory.peak_bytes):
        step()
    short = Memory(model, optimizer, limit=memory.peak_bytes - 1)
    held = r"holds \d\.\d\d MB, and may hold \d\.\d\d: (\w+ \d\.\d\d, )+\w+ \d\.\d\d$"
    with pytest.raises(MemoryError, match=held), short:
        step()
    assert memory.peak_bytes == short.peak_bytes


def test_nothing_beyond_is_known_on_a_cpu():
    with Memory(device="cpu") as memory:
        assert memory.unseen() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda_the_bytes_are_the_allocators():
    model, x, y = small_gpt()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    optimizer = make_optimizer(model, "adamw")

    def step(memory=None):
        loss = cross_entropy(model(x), y)
        after = [memory.unseen()] if memory else []
        loss.backward()
        after += [memory.unseen()] if memory else []
        optimizer.step()
        optimizer.zero_grad()
        return [*after, memory.unseen()] if memory else []

    step()  # libraries allocate their workspaces once
    with Memory(model, optimizer) as memory:
        before = memory.unseen() - bytes_of([x, y])  # not used yet, so not tracked
        assert step(memory) == [before] * 3
