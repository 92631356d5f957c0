"""What data-parallel ranks divide and decide jointly; tests/training checks that N match one."""

import math

import pytest
import torch
import torch.distributed as dist

from utils.memory.precision import LossScaler, autocast, weight_format
from utils.parallel import zero
from utils.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3, device="cpu") as group:
        yield group


# ---- precision


def test_precisions():
    assert weight_format("bf16") == weight_format("fp16") == torch.float32
    assert weight_format("fp64") == torch.float64
    a = torch.ones(2, 2)
    with autocast("bf16", "cpu"):
        assert (a @ a).dtype == torch.bfloat16
    with autocast("fp32", "cpu"):
        assert (a @ a).dtype == torch.float32


def scaled_steps(per_rank):
    """Take SGD steps with given gradients (steps x values), scaled as by a backward pass; return
    (parameters, scale, stepped) after each step."""
    parameter = torch.zeros(per_rank.shape[1])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = LossScaler("fp16", CPU, initial=8.0, growth_interval=2)
    trace = []
    for gradient in per_rank:
        parameter.grad = scaler.scale(gradient)
        scaler.unscale_([parameter])
        stepped = scaler.step(optimizer)
        trace.append((parameter.tolist(), scaler.factor, stepped))
    return trace


def grad_scaler_steps(gradients):
    """The same with torch.amp.GradScaler."""
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
    """7 steps of 6 values: inf in step 2 on the first of three ranks, NaN in step 5 on the last."""
    gradients = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    gradients[2, 1], gradients[5, 4] = math.inf, math.nan
    return gradients


def on_a_shard():
    rank = dist.get_rank()
    return scaled_steps(gradients_with_overflow()[:, 2 * rank : 2 * rank + 2])


def test_ranks_skip_together_as_grad_scaler_does_with_all_gradients(ranks):
    expected = grad_scaler_steps(gradients_with_overflow())
    assert [stepped for *_, stepped in expected] == [True, True, False, True, True, False, True]
    shards = ranks.run(on_a_shard)
    for step, (whole, scale, stepped) in enumerate(expected):
        assert [value for trace in shards for value in trace[step][0]] == whole
        assert {trace[step][1:] for trace in shards} == {(scale, stepped)}


def test_other_precisions_are_not_scaled():
    scaler = LossScaler("bf16", CPU)
    assert scaler.scale(torch.tensor(3.0)).item() == 3.0 and scaler.state_dict() == {}
    scaler.load_state_dict({"scale": 4.0, "_growth_tracker": 1})
    assert scaler.factor == 1.0


# ---- ZeRO-1


def test_owners_share_nearly_equally():
    assert zero.owners([5, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1, 1]
    sizes = [1464, 24, 576, 288, 288, 576, 24, 1536, 1536, 1536, 24, 1464]  # of a small GPT
    owner = zero.owners(sizes, 3)
    load = [sum(s for s, o in zip(sizes, owner) if o == rank) for rank in range(3)]
    assert max(load) - min(load) <= max(sizes) and len(owner) == len(sizes)


def too_many_ranks():
    zero.FlatParameters(torch.nn.Linear(2, 2))


def test_more_ranks_than_parameters_are_refused(ranks):
    with pytest.raises(Exception, match="3 ranks cannot split 2 parameters, each of which has one"):
        ranks.run(too_many_ranks)
