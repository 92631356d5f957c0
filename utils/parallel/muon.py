"""Muon where every matrix is split over ranks, by ZeRO-2 and 3 or by tensor parallelism.

Muon needs the whole matrix to make its update orthogonal. torch's own class runs on split matrices
too, but adds up parts of products in bf16 across ranks, so its update depends on their number. Here
each rank keeps its part of the momentum, gathers the update of one matrix at a time, makes it
orthogonal as one rank would, and takes its part. Every rank does the whole computation, as in data
parallel training; what is saved is memory.
"""

import torch

from utils.parallel.full_tensor import part_of, whole


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` for parameters that are parts of matrices; the same numbers as on one
    rank. What a parameter is a part of: see `utils.parallel.full_tensor`."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter, group):
        state, gradient, momentum = self.state[parameter], parameter.grad, group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        change = _orthogonal_change(whole(update, parameter), group)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(part_of(change, parameter))


def _orthogonal_change(update, group):
    """What torch's Muon would add to a whole matrix for this update: a step from zero, without
    momentum of its own."""
    matrix = torch.zeros_like(update).requires_grad_()
    matrix.grad = update
    same = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([matrix], weight_decay=0.0, momentum=0.0, nesterov=False, **same).step()
    return matrix.detach()
