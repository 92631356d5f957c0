"""A rank of a fake world does what a real rank does and what the planner predicts."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.tiers import first
from utils.choices import RECOMPUTE
from utils.models.config import GPTConfig
from utils.parallel.context import WAYS
from utils.parallel.mesh import make_mesh
from utils.planner import fake_run
from utils.planner.fake_run import observe, world_of
from utils.planner.machine import ANY, MACHINES, Level
from utils.planner.model import Model
from utils.planner.network import LINK
from utils.planner.plan import plan
from utils.planner.strategy import Strategy
from utils.ranks import Ranks

SMALL = GPTConfig(vocab_size=250, hidden_size=64, layers=4, heads=4, kv_heads=2)
WIDE = GPTConfig(vocab_size=51200, hidden_size=12288, layers=4, heads=96)
BYTES = replace(MACHINES["dgx-h100"], levels=(Level(ANY, 1 / LINK, 0.0),))
LONG = GPTConfig(vocab_size=512, hidden_size=1024, layers=2, heads=8, kv_heads=2,
                 max_positions=65536)
AXES = ("tp", "cp", "pp", "dp_cp")
LONG_CASES = [  # the first three cover every way and every mode
    ([*WAYS][(n + shift) % 3], RECOMPUTE[n]) for shift in range(3) for n in range(3)
]


def traffic_of(seen):
    return {axis: (seen.calls(axis), seen.sent(axis)) for axis in AXES}


def for_real(config, mix, options):
    """What a real rank holds and sends in the step with the least memory in gloo's threads."""
    mesh = make_mesh(**mix)
    seen = min(
        (fake_run.one_step(config, mesh, **options) for _ in range(3)),
        key=lambda seen: seen.total,
    )
    return seen.parameters, traffic_of(seen), seen.memory


@pytest.fixture(scope="module")
def four():
    with Ranks(4, device="cpu", timeout=60) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "mix, options",
    first(0, [  # lesson 10 checks a fake rank against the formulas on every run
        ({"pp": 2, "tp": 2}, {"recompute": "full"}),
        ({"dp": 2, "tp": 2}, {"sequence_parallel": True}),
        ({"dp": 2, "pp": 2}, {"schedule": "interleaved", "chunks": 2}),
        ({"cp": 2, "tp": 2}, {"sequence_parallel": True, "context": "gather"}),
        ({"cp": 2, "pp": 2}, {"recompute": "full"}),
        ({"dp": 2, "cp": 2}, {"context": "ulysses", "recompute": "selective"}),
        ({"cp": 4}, {"seq": 31}),
    ]),
)
def test_a_fake_rank_does_what_the_real_one_does(four, mix, options):
    options = {"micro_batches": 4, "micro_batch": 2, "seq": 32, "precision": "fp32", **options}
    real = four.run(for_real, SMALL, mix, options)
    for rank in (0, 3):
        parameters, traffic, memory = real[rank]
        seen = observe(SMALL, **mix, rank=rank, **options)
        assert seen.parameters == parameters
        assert traffic_of(seen) == traffic
        for kind in ("parameters", "gradients", "optimizer"):
            assert seen.memory[kind] == memory[kind], kind
        # a fake world lacks what gloo's threads still hold for some milliseconds
        assert 0.7 * sum(memory.values()) < seen.total <= 1.05 * sum(memory.values())


@pytest.mark.parametrize("recompute", first(1, ["none", "full"]))
def test_a_thousand_ranks_hold_what_the_planner_says(recompute):
    mix = {"dp": 64, "pp": 2, "tp": 8}
    seen = observe(WIDE, **mix, micro_batches=4, recompute=recompute)
    strategy = Strategy(**mix, global_batch=4 * mix["dp"], recompute=recompute)
    said = plan(Model.of(WIDE, 2048), strategy, MACHINES["dgx-a100"])
    assert seen.total == pytest.approx(said.memory["total"], rel=0.05)
    assert seen.memory["optimizer"] == pytest.approx(12 * seen.parameters, rel=1e-6)
    assert seen.memory["parameters"] == 2 * seen.parameters

    layer = 2048 * 12288 * 2  # bytes of one micro-batch between two layers
    # four all-reduces per layer; recomputation stops before the last one of the forward pass,
    # whose result is not needed again
    a_layer = 5 if recompute == "full" else 4
    reduces = 4 * (a_layer * WIDE.layers // mix["pp"] + 1)  # and one for the embedding
    assert seen.calls("tp") == reduces
    assert seen.sent("tp") == reduces * 2 * 7 / 8 * layer
    assert seen.sent("pp") == 4 * layer
    assert seen.sent("dp") == 2 * 63 / 64 * 2 * seen.parameters


@pytest.mark.parametrize("way, recompute", first(1, LONG_CASES))
def test_a_rank_of_a_long_sequence_holds_and_sends_what_the_planner_says(way, recompute):
    """On a network of 1 byte/s, where nothing can hide, the seconds of cp equal its bytes."""
    mix, seq = {"dp": 2, "tp": 2, "cp": 4}, 32768
    seen = observe(LONG, **mix, seq=seq, micro_batches=2, context=way, recompute=recompute)
    strategy = Strategy(**mix, global_batch=4, recompute=recompute, context=way)
    said = plan(Model.of(LONG, seq), strategy, BYTES)
    assert seen.total == pytest.approx(said.memory["total"], rel=0.05)
    assert seen.sent("cp") == pytest.approx(said.seconds["cp"] + said.hidden["cp"], rel=1e-6)
    assert said.hidden["cp"] < 1e-3 * said.seconds["cp"]
    assert seen.sent("dp_cp") == 2 * 7 / 8 * 2 * seen.parameters


@pytest.mark.thorough  # lesson 10 does it too
def test_a_trillion_parameters_go_through_the_same_code():
    config = GPTConfig(vocab_size=51200, hidden_size=25600, layers=128, heads=160)
    assert config.parameter_count() > 1e12
    seen = observe(config, dp=6, pp=64, tp=8, micro_batches=1, recompute="full")
    layers = 2 * (4 * 25600**2 // 8 + 3 * 25600 * config.mlp_size // 8 + 2 * 25600)
    assert seen.parameters == layers + 51200 * 25600 // 8


def test_the_world_is_left_again():
    with world_of(2048, rank=7):
        assert (dist.get_rank(), dist.get_world_size()) == (7, 2048)
        with pytest.raises(RuntimeError, match="real process group"), world_of(2):
            pass
    assert not dist.is_initialized()


def test_a_rank_outside_of_the_world_is_named():
    with pytest.raises(ValueError, match="rank 8 is not in a world of 8"), world_of(8, rank=8):
        pass


def test_an_unknown_precision_is_named():
    with pytest.raises(ValueError, match="precision 'fp8'"):
        observe(SMALL, precision="fp8")
