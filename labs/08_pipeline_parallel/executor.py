"""Lab 08d: an executor, which runs a rank's list with real sends and receives.

total = run([("F", 0), ("F", 1), ("B", 0), …], stage, micro_batches, loss, boundary)
"""

from collections.abc import Callable

import torch
import torch.distributed as dist


def run(
    actions: list[tuple[str, int]],
    stage: torch.nn.Module,
    micro_batches: list[tuple[torch.Tensor, torch.Tensor]],
    loss: Callable,
    boundary: Callable,
) -> torch.Tensor | None:
    """Run one step of this rank's pipeline stage. Every rank calls it with its own list and stage.

    actions        this rank's ("F", n) and ("B", n), to be run in this order
    stage          a module: tensor in, tensor out, possibly not contiguous, as messages must be;
                   its gradients are added to `.grad`
    micro_batches  (x, y) by number, the same on all ranks: x enters rank 0's stage, y is for `loss`
    loss           loss(out, y), on the last rank: a micro-batch's contribution to the step's loss
    boundary       boundary(x) -> (shape, dtype) of the message that each rank except the last sends
                   to the next for a micro-batch; its gradient, of the same size, comes back

    Returns the sum of the losses, without history, on the last rank; None on the others.

    Any lists that can complete must work: a rank may need messages in an order other than that in
    which they are sent (a message can have a number, `tag=n`; with NCCL it cannot), and several
    ranks may send first. Nothing else is sent. After the B of a micro-batch, nothing of its forward
    pass is kept; a gradient may stay until the end of the step.
    """
    raise NotImplementedError("run the actions; sends must not wait, and must not be forgotten")
