"""Exercise 03a: a dynamic loss scaler for fp16, whose ranks skip a step together or not at all.

    scaler = LossScaler(init_scale=2.0**16)
    scaler.scale_loss(loss).backward()    # DDP averages the gradients, all `scale` times too large
    scaler.step(optimizer, clip=1.0)      # unscales, clips, steps or skips, changes the scale
    optimizer.zero_grad()

A rank's optimizer may hold all parameters (DDP) or only a share of them (lesson 05). In the second
case an overflow may sit in a share that the other ranks never look at. Write the four pieces;
torch.amp.GradScaler itself, which you rebuild, is not used.
"""

import torch
import torch.distributed as dist


class LossScaler:
    """The rules of torch.amp.GradScaler, with the ranks' agreement added."""

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
        """The loss that backward() should see."""
        ### BEGIN SOLUTION: return the loss times the scale
        return loss * self.scale
        ### END SOLUTION

    @torch.no_grad()
    def unscale(self, parameters: list[torch.nn.Parameter]) -> bool:
        """Divides every .grad by the scale, in place. True if ANY rank has an inf or a NaN.

        Every one, also after the first that is not finite, and where it lies: other tensors may
        share its memory. Gradients are fp16, bf16, fp32 or fp64; large ones are no overflow as long
        as each number is finite. All ranks return the same. It takes one all-reduce of one number,
        in every step, also on a rank that has no parameters. A .grad that is None stays None.
        """
        ### BEGIN SOLUTION: divide by the scale, look for inf and NaN, agree with all ranks
        found = torch.zeros(1)
        for parameter in parameters:
            if parameter.grad is None:
                continue
            parameter.grad /= self.scale
            if not parameter.grad.isfinite().all():
                found.fill_(1.0)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())
        ### END SOLUTION

    def update(self, overflow: bool) -> None:
        """Changes the scale after a step: `overflow` says whether the step was skipped.

        Overflow: times backoff_factor, also below 1. `growth_interval` steps in a row without one:
        times growth_factor. After either, `good_steps` is 0, and the counting begins anew. No
        message: all ranks know `overflow`.
        """
        ### BEGIN SOLUTION: after an overflow shrink the scale; after enough good steps let it grow
        if overflow:
            self.scale *= self.backoff_factor
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.good_steps = 0
        ### END SOLUTION

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> bool:
        """One step of the optimizer, unless some rank overflowed. True if it was made.

        clip: the largest norm that the true gradients may have (only where every rank has all of
        them): torch.nn.utils.clip_grad_norm_(parameters, clip).
        """
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        ### BEGIN SOLUTION: unscale, then clip and step if no rank overflowed, update the scale
        overflow = self.unscale(parameters)
        if not overflow:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
        self.update(overflow)
        return not overflow
        ### END SOLUTION
