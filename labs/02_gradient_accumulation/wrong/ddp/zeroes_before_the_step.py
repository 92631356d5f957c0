"""Zeroes the gradients before the step.

hint: is optimizer.step() called, with gradients still there
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from labs.support.gradient_accumulation.tiny_model import loss_sum


def train_step(model, micro_batches, optimizer, max_norm):
    tokens = tokens_of_all(micro_batches)  # noqa: F821
    total = torch.zeros((), dtype=torch.float64)
    last = len(micro_batches) - 1
    for i, (x, y) in enumerate(micro_batches):
        with model.no_sync() if i < last else nullcontext():
            loss = loss_sum(model, x, y)
            (loss * dist.get_world_size() / tokens).backward()
        total += loss.detach()
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.zero_grad()
    optimizer.step()
    dist.all_reduce(total)
    return total.item() / tokens
