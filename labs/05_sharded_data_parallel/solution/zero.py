"""Lab 05: ZeRO-1, ZeRO-2 and ZeRO-3, three steps in one file.

    zero = Zero1(modules, make_optimizer)   # instead of an optimizer over model.parameters()
    model(x) … .backward()                  # on this rank's rows, as usual
    zero.step()                             # the mean gradient, and the new parameters everywhere

Each class builds on the previous one. A `Unit` (unit.py) holds the parameters of one module as one
flat tensor of N equal shards; shard r belongs to rank r.

Any number of ranks, fp32 or fp64; a single rank obeys the memory limits too. A rank without rows
contributes zeros as its gradient; so does, at stage 1, a parameter without a gradient (stages 2 and
3 need one for every parameter in each backward pass). Write all of it by hand, with the collectives
of torch.distributed.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.support.sharded_data_parallel.unit import Unit


class Zero1:
    """Stage 1: each rank keeps the optimizer state of its own shard only.

    modules: the model's units; the parameters of each are sent together.
    make_optimizer: called with the list of this rank's shards, returns a torch optimizer.
    """

    def __init__(self, modules: list[torch.nn.Module], make_optimizer: Callable):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.units = [Unit(module, f"unit {index}") for index, module in enumerate(modules)]
        for unit in self.units:
            unit.shard = torch.nn.Parameter(self.own_part(unit))
        self.optimizer = make_optimizer([unit.shard for unit in self.units])

    def own_part(self, unit: Unit) -> torch.Tensor:
        """This rank's shard of the parameters, (length,): a view, so a step changes unit.flat."""
        ### BEGIN SOLUTION: return this rank's shard of unit.flat, without a copy
        return unit.parts()[self.rank]
        ### END SOLUTION

    def mean_gradient(self, unit: Unit) -> torch.Tensor:
        """This rank's shard of the gradient's mean over all ranks, (length,), in a new tensor: not
        a view of a larger one, which it would keep in memory."""
        ### BEGIN SOLUTION: reduce-scatter the unit's gradients; each rank gets its own shard
        mine = torch.empty_like(unit.shard)
        dist.reduce_scatter(mine, unit.parts(unit.gradients()))
        return mine / self.size
        ### END SOLUTION

    def gather(self, unit: Unit) -> None:
        """Fill unit.flat with the shards of all ranks."""
        ### BEGIN SOLUTION: all-gather unit.shard.data of every rank into unit.parts()
        dist.all_gather(unit.parts(), unit.shard.data)
        ### END SOLUTION

    def step(self) -> None:
        """After the backward pass, take one optimizer step: the same new parameters on all ranks.

        No gradients are left, neither full ones nor those of the shards, and nothing else is kept.
        """
        ### BEGIN SOLUTION: mean gradients into shard.grad, forget the rest, optimizer step, gather
        for unit in self.units:
            unit.shard.grad = self.mean_gradient(unit)
            unit.forget_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units:
            self.gather(unit)
        ### END SOLUTION


class Zero2(Zero1):
    """Stage 2: also, the full gradients of a unit exist only until the unit is complete."""

    def __init__(self, modules: list[torch.nn.Module], make_optimizer: Callable):
        super().__init__(modules, make_optimizer)
        for unit in self.units:
            unit.missing = len(unit.parameters)  # gradients that are not ready yet
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, unit=unit: self.gradient_ready(unit)
                )

    def gradient_ready(self, unit: Unit) -> None:
        """Called by PyTorch during the backward pass, once for each parameter of the unit."""
        unit.missing -= 1
        if unit.missing == 0:
            unit.missing = len(unit.parameters)
            self.after_backward(unit)

    def after_backward(self, unit: Unit) -> None:
        """Called when all gradients of the unit are ready; those of earlier layers follow.

        There may be several backward passes before step(): their gradients add up.
        """
        ### BEGIN SOLUTION: add the mean gradient to unit.shard.grad, forget the full gradients
        part = self.mean_gradient(unit)
        unit.shard.grad = part if unit.shard.grad is None else unit.shard.grad + part
        unit.forget_gradients()
        ### END SOLUTION

    def step(self) -> None:
        """Take a step. The gradients are already reduced; again none are left afterwards."""
        ### BEGIN SOLUTION: optimizer step, forget the shards' gradients, gather
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units:
            self.gather(unit)
        ### END SOLUTION


class Zero3(Zero2):
    """Stage 3: also, the full parameters of a unit exist only while the unit computes."""

    def __init__(self, modules: list[torch.nn.Module], make_optimizer: Callable):
        super().__init__(modules, make_optimizer)
        for unit in self.units:
            unit.release()
            unit.module.register_forward_pre_hook(lambda *_, unit=unit: self._forward(unit))
            unit.module.register_forward_hook(
                lambda _, inputs, output, unit=unit: self._forward_ends(unit, output)
            )

    def own_part(self, unit: Unit) -> torch.Tensor:
        """This rank's shard, (length,), in memory of its own: unit.flat will be released."""
        ### BEGIN SOLUTION: return a copy of this rank's shard
        return super().own_part(unit).clone()
        ### END SOLUTION

    def before_forward(self, unit: Unit) -> None:
        """Called when the unit is about to compute."""
        ### BEGIN SOLUTION: allocate the full parameters and gather them
        unit.allocate()
        self.gather(unit)
        ### END SOLUTION

    def after_forward(self, unit: Unit) -> None:
        """Called when the unit has computed and the next one is about to."""
        ### BEGIN SOLUTION: what is not needed now?
        unit.release()
        ### END SOLUTION

    def before_backward(self, unit: Unit) -> None:
        """Called when the gradient of the unit's output is ready and its backward pass begins."""
        ### BEGIN SOLUTION: what does the backward pass need?
        unit.allocate()
        self.gather(unit)
        ### END SOLUTION

    def after_backward(self, unit: Unit) -> None:
        """Called when all gradients of the unit are ready."""
        ### BEGIN SOLUTION: what stage 2 does, and what else is not needed now?
        super().after_backward(unit)
        unit.release()
        ### END SOLUTION

    def step(self) -> None:
        """Take a step. Gather nothing: the next forward pass gathers what it needs."""
        ### BEGIN SOLUTION: what is left of a step?
        self.optimizer.step()
        self.optimizer.zero_grad()
        ### END SOLUTION

    # Given: a hook that returned something would change the model's outputs, and computing on
    # memory that is not there would end the process.

    def _forward(self, unit: Unit) -> None:
        self.before_forward(unit)
        unit.must_be_whole("before_forward")

    def _forward_ends(self, unit: Unit, output: torch.Tensor) -> None:
        self.after_forward(unit)
        if output.requires_grad:  # called when the output's gradient is ready
            output.register_hook(lambda _: self._backward(unit))

    def _backward(self, unit: Unit) -> None:
        self.before_backward(unit)
        unit.must_be_whole("before_backward")
