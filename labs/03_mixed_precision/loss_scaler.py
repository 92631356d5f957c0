"""Exercise 03a: a dynamic loss scaler for fp16, whose ranks skip a step together or not at all.

    scaler = LossScaler(init_scale=2.0**16)
    scaler.scale_loss(loss).backward()    # DDP averages the gradients, all `scale` times too large
    scaler.step(optimizer, clip=1.0)      # unscales, clips, steps or skips, changes the scale
    optimizer.zero_grad()

A rank's optimizer may hold all parameters (DDP) or only a shard of them (lesson 05). In the second
case an overflow may be in a shard that the other ranks never see. Write the four methods without
torch.amp.GradScaler: it is what you are building.
"""

import torch
import torch.distributed as dist


class LossScaler:
    """The rules of torch.amp.GradScaler, plus agreement among the ranks."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ):
        self.scale = init_scale
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval = growth_interval
        self.good_steps = 0  # steps in a row without an overflow, since the scale last changed

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss that backward() should see."""
        raise NotImplementedError("return the loss times the scale")

    @torch.no_grad()
    def unscale(self, parameters: list[torch.nn.Parameter]) -> bool:
        """Divide every .grad by the scale, in place. Returns True if ANY rank has an inf or a NaN.

        Divide all of them, even after the first that is not finite, and in place: other tensors may
        share their memory. Gradients are fp16, bf16, fp32 or fp64; large ones are not an overflow
        as long as each element is finite. All ranks return the same. It takes one all-reduce of one
        value in every step, even on a rank that has no parameters. A .grad that is None stays None.
        """
        raise NotImplementedError("divide by the scale, look for inf and NaN, agree with all ranks")

    def update(self, overflow: bool) -> None:
        """Change the scale after a step. overflow: whether the step was skipped.

        An overflow multiplies it by backoff_factor, even below 1; `growth_interval` steps in a row
        without one multiply it by growth_factor. After either, `good_steps` starts again at 0. No
        message: all ranks know `overflow`.
        """
        raise NotImplementedError(
            "after an overflow shrink the scale; after enough good steps let it grow"
        )

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> bool:
        """Take an optimizer step unless some rank overflowed. Returns True if it was taken.

        clip: the largest norm that the true gradients may have (only used if every rank has all of
        them): torch.nn.utils.clip_grad_norm_(parameters, clip).
        """
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        raise NotImplementedError(
            "unscale, then clip and step if no rank overflowed, update the scale"
        )
