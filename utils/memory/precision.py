"""Which number format a training run computes in, and the scaling of the loss that fp16 needs.

    fp32, fp64   weights and every operation in that format
    bf16, fp16   weights, gradients and optimizer stay in fp32 (the "master weights"). autocast
                 computes matrix products in 16 bits and keeps norms, softmax and loss in 32;
                 weights_in computes all but the loss in 16, from one copy of the weights

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
    """Whether matrix products are computed in fewer bits than the weights have."""
    return DTYPES[precision].itemsize == 2


def weight_format(precision: str) -> torch.dtype:
    """The format of weights, gradients and optimizer: fp32, or fp64 where that is asked for."""
    return torch.float32 if is_mixed(precision) else DTYPES[precision]


def autocast(precision: str, device: torch.device | str) -> AbstractContextManager:
    """A context manager for the forward pass; it may be entered again and again."""
    if not is_mixed(precision):
        return nullcontext()
    return torch.autocast(torch.device(device).type, DTYPES[precision])


@contextmanager
def weights_in(dtype: torch.dtype, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Around forward *and* backward passes: the modules compute with copies of their parameters.

    A copy is made once for all passes inside; autocast casts in every one of them, and casts each
    activation again for every matrix that reads it. Gradients pass the cast on their way back, so
    they add up in the parameters' own format, and hooks and `named_parameters()` see no difference.
    It is what FSDP2's `MixedPrecisionPolicy(param_dtype=dtype)` does where nothing is sharded.
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
    """The parameter that `weights_in` has copied; anything else itself."""
    return getattr(weight, "copied_from", weight)


class LossScaler:
    """Loss scaling for fp16; in every other precision it changes nothing.

    Gradients below 6e-8 are zero in fp16. So the loss, and with it every gradient, is multiplied by
    a scale, and the fp32 gradients are divided by it before the optimizer sees them. A scale that
    is too large gives inf: then the step is skipped and the scale halved. After `growth_interval`
    steps without one it is doubled. The counting is `torch.amp.GradScaler`'s; what is added here is
    that all ranks decide together, also where each sees only a part of the gradients; and that a
    loss which is multiplied by N, because N ranks' gradients will be averaged (`averages_over`), is
    multiplied by N only afterwards: in fp16 the factor would overflow where one rank does not.

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
        """What the loss of the step is multiplied by at present."""
        return self._scaler.get_scale()

    @property
    def rank_factor(self) -> float:
        """What a rank's loss is multiplied by, which has the factor `averages_over` already."""
        return self.factor / self._averages_over

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.rank_factor if self.enabled else loss

    def unscale_(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divides the gradients of this rank's parameters (plain tensors) by the scale."""
        if self.enabled:
            gradients = [p.grad for p in parameters if p.grad is not None]
            self._spread_overflow(gradients)
            self._seen = _Gradients(parameters)
            self._scaler.scale(torch.zeros((), device=self.device))  # it wants to have been asked
            self._scaler.unscale_(self._seen)
            for gradient in gradients if self._averages_over > 1 else ():
                gradient.mul_(self._averages_over)

    def _spread_overflow(self, gradients):
        """Where any rank has inf or NaN, every rank gets one: so all of them skip."""
        gradients = [gradient for gradient in gradients if gradient.numel()]
        largest = get_total_norm(gradients, norm_type=math.inf).to(self.device)
        overflow = largest.isfinite().logical_not().float()
        if dist.is_initialized():
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        if overflow.item():
            gradients[0].fill_(math.inf)

    def step(self, optimizer: Any) -> bool:
        """Steps the optimizer, or skips it; returns whether it stepped."""
        if not self.enabled:
            optimizer.step()
            return True
        self._seen.step, before = optimizer.step, self.factor
        self._scaler.step(self._seen)
        self._scaler.update()
        return self.factor >= before

    def state_dict(self) -> dict:
        """The scale and the number of steps since its last change; {} where nothing is scaled."""
        state = self._scaler.state_dict()
        return {name: state[name] for name in ("scale", "_growth_tracker") if state}

    def load_state_dict(self, state: dict) -> None:
        """Takes what `state_dict` gave; a run in another precision has none and changes nothing."""
        if state and self.enabled:
            self._scaler.load_state_dict({**self._scaler.state_dict(), **state})


class _Gradients:
    """What GradScaler asks of an optimizer: parameters with gradients, and a step."""

    def __init__(self, parameters):
        self.param_groups = [{"params": parameters}]
