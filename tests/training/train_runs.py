"""Shared by the tests of a training run: running it, and how closely two runs must match."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from utils.measure.traffic import Traffic
from utils.memory.precision import weight_format
from utils.models.gpt import GPT
from utils.training.train import train

# how far a run may be from the plain one: relative, for losses and gradient norms; and, for the
# parameters, as a fraction of how far they moved: AdamW's first steps follow the gradients' signs
TOLERANCE = {
    "fp64": (1e-9, 1e-6),
    "fp32": (2e-5, 5e-3),
    "bf16": (5e-3, 0.2),
    "fp16": (2e-3, 0.1),
}
# Muon orthogonalizes its matrices in bf16, which rounds more than the run's own precision
MUON = (2e-4, 0.1)


def run(config, count=False):
    """Return (metric rows, {name: parameter} on rank 0, [(operation, bytes)] of the second step).

    count   whether to count the traffic, which slows down every operation
    """
    rows, marks = [], []
    with Traffic() if count else nullcontext() as traffic:

        def on_step(row):
            rows.append(row)
            marks.append(len(traffic.events) if count else 0)

        model, _ = train(config, on_step=on_step)
    events = traffic.events[marks[0] : marks[1]] if count else []
    first = not dist.is_initialized() or dist.get_rank() == 0
    return rows, dict(model.state_dict()) if first else None, [(e.op, e.payload) for e in events]


@functools.cache
def plain(config):
    return run(config)


@functools.cache
def initial(config):
    torch.manual_seed(config.seed)
    return GPT(config.model_config()).to(weight_format(config.precision)).state_dict()


def distance(parameters, others, start):
    """The distance between two sets of parameters, relative to how far the second moved."""
    apart = sum((parameters[name] - others[name]).square().sum() for name in others)
    way = sum((others[name] - start[name]).square().sum() for name in others)
    return (apart / way).sqrt().item()


def tolerance(config):
    if config.optimizer == "muon" and config.precision == "fp32":
        return MUON
    near, way = TOLERANCE[config.precision]
    # rounding to 16 bits sends some tokens to other experts
    return near, 2 * way if config.experts else way


def totals(events):
    """Return {operation: (calls, bytes)}, without DDP's broadcast of its bucket order in step 2."""
    result = {}
    for op, payload in events:
        if op == "broadcast":
            continue
        calls, bytes_ = result.get(op, (0, 0))
        result[op] = (calls + 1, bytes_ + payload)
    return result


def assert_same_run(ours, theirs, config):
    """Assert equal metrics and final parameters, as closely as the precision allows.

    ours, theirs   (rows, parameters) of `run`; theirs is the plain run, with `config`
    """
    near, way = tolerance(config)
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert set(mine) == set(other), f"{sorted(mine)} at step {mine['step']}"
        for key in set(mine) - {"seconds", "tokens_per_s"}:
            rel = 5 * near if key == "grad_norm" else near
            assert mine[key] == pytest.approx(other[key], rel=rel), f"{key}, step {mine['step']}"
    assert set(ours[1]) == set(theirs[1]), "parameter names differ"
    apart = distance(ours[1], theirs[1], initial(config))
    assert apart < way, f"parameters differ by {apart:.2} of how far they moved"
