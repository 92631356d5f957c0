"""One sequence of 4,096 tokens on four ranks: the run of one rank, a quarter of its activations."""

from dataclasses import replace

import pytest
import torch

from tests.training.train_runs import assert_same_run, plain, run
from utils.measure.memory import Memory
from utils.parallel.context import WAYS
from utils.ranks import Ranks
from utils.training import step
from utils.training.train import TrainConfig, train

LONG = TrainConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, batch=1, seq=4096, steps=2, held_out_every=99,
    optimizer="adamw", device="cpu", sample=0, warmup=0.0, precision="fp64", dp=1,
)


@pytest.fixture(scope="module")
def four():
    torch.set_num_threads(1)
    with Ranks(4, device="cpu", timeout=120) as ranks:
        yield ranks


def activations(config):
    """Bytes of activations on this rank at the peak of a step's passes; keys and values, which wait
    for the backward pass too, are "communication" where they were sent."""
    peaks, passes = [], step.TrainStep.backward

    def measured(engine, micro_batches, tokens):
        with Memory(engine.model, engine.optimizer) as memory:
            result = passes(engine, micro_batches, tokens)
        peaks.append(memory.peak["activations"] + memory.peak["communication"])
        return result

    step.TrainStep.backward = measured
    try:
        train(replace(config, steps=1))
    finally:
        step.TrainStep.backward = passes
    return peaks[0]


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_the_run_is_that_of_one_rank(four, way):
    rows, parameters, _ = four.run(run, replace(LONG, cp=4, context=way))[0]
    assert_same_run((rows, parameters), plain(LONG)[:2], LONG)


@pytest.mark.thorough
def test_a_rank_has_a_quarter_of_the_activations(four):
    whole = activations(LONG)
    for held in four.run(activations, replace(LONG, cp=4)):
        assert held == pytest.approx(whole / 4, rel=1e-3)
