"""Data parallelism: every rank holds the whole model and learns from its own rows.

    parallel = data_parallel(model)
    for number, (x, y) in enumerate(micro_batches, start=1):
        with without_sync(parallel, last=number == len(micro_batches)):
            loss_of(parallel(x), y).backward()       # the last one all-reduces, once

DDP averages gradients over the ranks while the backward pass still runs (Li et al.,
arXiv:2006.15704). What it sums is what has been accumulated so far, so all passes of a step but the
last can do without communication.

Where a rank runs pieces of a model in an order of its own, as in a pipeline, `SummedGradients` adds
up the gradients after the last pass.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BUCKET = 25 * 2**20  # bytes of gradients that travel together, as in DDP


def data_parallel(model, group=None):
    """DDP round the model; gradients are views of the buckets, not copies of them.

    group   the ranks that share the rows; None: all of them
    """
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def without_sync(model, last):
    """A context for one forward *and* backward pass that all-reduces only if it is the last.

    DDP decides in the forward pass whether the backward pass will communicate: entered after the
    forward pass, this has no effect. A model that is not data parallel passes through.
    """
    return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


class SummedGradients:
    """Adds up gradients over the ranks of an axis, when asked to; every rank keeps all of them.

    named   {name: parameter}, the same on every rank of the axis
    It has the methods of `utils.parallel.zero.WholeParameters`, which keeps less.
    """

    def __init__(self, named, axis):
        self.named, self.axis = dict(named), axis
        self.owned = self.named  # every rank updates all of them

    def reduce_gradients(self):
        if self.axis.group is None:
            return
        for gradients in _bunches([p.grad for p in self.named.values() if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self.axis.group)
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients])):
                gradient.copy_(total.view_as(gradient))

    def gather_parameters(self):
        """Nothing: every rank has updated all of them."""

    def zero_grad(self):
        for parameter in self.named.values():
            parameter.grad = None

    def from_owner(self, key, state):
        """A state of the optimizer: every rank has them all."""
        return state[key]

    def release(self):
        """Nothing to give back."""


def _bunches(tensors):
    """Lists of tensors, in order, of `BUCKET` bytes or one tensor."""
    bunch, size = [], 0
    for tensor in tensors:
        if bunch and size + tensor.nbytes > BUCKET:
            yield bunch
            bunch, size = [], 0
        bunch.append(tensor)
        size += tensor.nbytes
    if bunch:
        yield bunch
