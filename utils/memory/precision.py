"""The number formats in which a training run computes, and the loss scaling that fp16 needs.

    fp32, fp64   weights and every operation in that format
    bf16, fp16   weights, gradients and optimizer stay in fp32 (the "master weights"). autocast
                 computes matrix products in 16 bits and keeps norms, softmax and loss in 32;
                 weights_in computes all but the loss in 16 bits, from one copy of the weights

    with autocast("fp16", device):
        logits = model(x)
    with weights_in(torch.bfloat16, [model]):
        cross_entropy(model(x), y).backward()

Mixed precision and loss scaling: Micikevicius et al., arXiv:1710.03740, section 3.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
PRECISIONS = tuple(DTYPES)


def is_mixed(precision: str) -> bool:
    """Whether matrix products use fewer bits than the weights."""
    return DTYPES[precision].itemsize == 2


def weight_format(precision: str) -> torch.dtype:
    """The format of weights, gradients and optimizer: fp32, or fp64 for precision fp64."""
    return torch.float32 if is_mixed(precision) else DTYPES[precision]


def autocast(precision: str, device: torch.device | str) -> AbstractContextManager:
    """A context manager for the forward pass, which may be entered repeatedly."""
    if not is_mixed(precision):
        return nullcontext()
    return torch.autocast(torch.device(device).type, DTYPES[precision])


@contextmanager
def weights_in(dtype: torch.dtype, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make the modules compute with copies of their parameters, in forward *and* backward passes.

    Each copy is made once for all passes inside; autocast casts in every pass, and casts each
    activation again for every matrix that reads it. Gradients flow back through the cast, so they
    add up in the parameters' own format, and hooks and `named_parameters()` see no difference. It
    does without sharding what FSDP2's `MixedPrecisionPolicy(param_dtype=dtype)` does.
    """
    copies, shadowed = {}, []
    try:
        for module in {each for whole in modules for each in whole.modules()}:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in copies:
                    copies[parameter] = parameter.to(dtype)
                    copies[parameter].copied_from = parameter
                # an attribute of the instance is found before a parameter of the same name
                module.__dict__[name] = copies[parameter]
                shadowed.append((module.__dict__, name))
        yield
    finally:
        for attributes, name in shadowed:
            del attributes[name]


def master_of(weight: torch.Tensor | None) -> torch.Tensor | None:
    """The parameter behind a copy of `weights_in`; anything else itself."""
    return getattr(weight, "copied_from", weight)


class LossScaler:
    """Loss scaling for fp16; in every other precision it changes nothing.

    Gradients below about 6e-8 are zero in fp16. The loss, and with it every gradient, is therefore
    multiplied by a scale, and the fp32 gradients are divided by it before the optimizer sees them.
    A scale that is too large produces inf: then the step is skipped and the scale is halved. After
    `growth_interval` steps without inf it is doubled. `torch.amp.GradScaler` keeps the count; this
    class adds two things. All ranks decide together, even if each sees only some of the gradients.
    And a loss that is multiplied by N, because the gradients of N ranks are averaged
    (`averages_over`), gets that factor only after the backward pass: in fp16 it would cause
    overflows that a single rank does not have.

        (scaler.scale(loss)).backward()
        scaler.unscale_(parameters)
        stepped = scaler.step(optimizer)         # False: skipped, on every rank
    """

    def __init__(
        self,
        precision: str,
        device: torch.device | str,
        initial: float = 2.0**16,
        growth_interval: int = 2000,
        *,
        averages_over: int = 1,
    ):
        self.enabled = precision == "fp16"
        self._averages_over = averages_over if self.enabled else 1
        self.device = torch.device(device)
        self._scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=initial,
            growth_interval=growth_interval,
            enabled=self.enabled,
        )
        self._seen = None

    @property
    def factor(self) -> float:
        """The current factor of the step's loss."""
        return self._scaler.get_scale()

    @property
    def rank_factor(self) -> float:
        """The factor for a rank's loss, which already contains `averages_over`."""
        return self.factor / self._averages_over

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.rank_factor if self.enabled else loss

    def unscale_(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide the gradients of this rank's parameters (plain tensors) by the scale."""
        if self.enabled:
            gradients = [p.grad for p in parameters if p.grad is not None]
            self._spread_overflow(gradients)
            self._seen = _Gradients(parameters)
            self._scaler.scale(torch.zeros((), device=self.device))  # it insists on a prior scale()
            self._scaler.unscale_(self._seen)
            for gradient in gradients if self._averages_over > 1 else ():
                gradient.mul_(self._averages_over)

    def _spread_overflow(self, gradients):
        """If any rank has inf or NaN, give one to every rank, so that all skip."""
        gradients = [gradient for gradient in gradients if gradient.numel()]
        largest = get_total_norm(gradients, norm_type=math.inf).to(self.device)
        overflow = largest.isfinite().logical_not().float()
        if dist.is_initialized():
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        if overflow.item():
            gradients[0].fill_(math.inf)

    def step(self, optimizer: Any) -> bool:
        """Step the optimizer, or skip the step; return whether it stepped."""
        if not self.enabled:
            optimizer.step()
            return True
        self._seen.step, before = optimizer.step, self.factor
        self._scaler.step(self._seen)
        self._scaler.update()
        return self.factor >= before

    def state_dict(self) -> dict:
        """The scale and the number of steps since its last change; {} without scaling."""
        state = self._scaler.state_dict()
        return {name: state[name] for name in ("scale", "_growth_tracker") if state}

    def load_state_dict(self, state: dict) -> None:
        """Load the output of `state_dict`; that of a run in another precision is {}: no change."""
        if state and self.enabled:
            self._scaler.load_state_dict({**self._scaler.state_dict(), **state})


class _Gradients:
    """The parts of an optimizer that GradScaler uses: parameters with gradients, and a step."""

    def __init__(self, parameters):
        self.param_groups = [{"params": parameters}]
