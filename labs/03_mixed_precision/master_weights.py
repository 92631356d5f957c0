"""Exercise 03b: train a bf16 model with fp32 master weights, on several ranks.

    optimizer = MasterWeights(model.parameters(), lambda masters: torch.optim.AdamW(masters))
    for x, y in micro_batches:                  # one or several
        (loss_of(model, x, y) / len(micro_batches)).backward()
        optimizer.collect()                     # bf16 gradients are added up in fp32
    optimizer.step()                            # mean over the ranks, update, back to bf16

The model computes in bf16, 2 bytes per parameter. bf16 has 8 significant bits: a small update added
to a large weight is rounded away. So the updates go to fp32 copies, the masters. Write the three
methods.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist


class MasterWeights:
    """An optimizer over fp32 copies of the model's bf16 parameters."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ):
        self.parameters = list(parameters)
        self.masters = self.copies()
        self.optimizer = make(self.masters)  # its state is fp32, like the masters

    def copies(self) -> list[torch.Tensor]:
        """An fp32 copy of each parameter, in memory that nothing else uses."""
        raise NotImplementedError(
            "return a list of fp32 copies of self.parameters, outside of autograd"
        )

    @torch.no_grad()
    def collect(self) -> None:
        """Add each bf16 .grad to its master's fp32 .grad, and free it (.grad = None).

        A master's .grad is None at the beginning of each step. A parameter may have no .grad. No
        communication.
        """
        raise NotImplementedError(
            "accumulate in fp32, in the masters' .grad, and free the bf16 gradients"
        )

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients over the ranks in fp32, in one message; update; round back.

        The message has 4 bytes per parameter. A gradient that this rank does not have counts as
        zeros; a NaN on one rank is a NaN in the mean. Afterwards the bf16 parameters hold the
        rounded masters, and no master has a .grad.
        """
        raise NotImplementedError(
            "fp32 all-reduce, divide by the number of ranks, step, copy back, clear"
        )
