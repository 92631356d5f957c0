"""All micro-batches inside no_sync, the last one too.

hint: never all-reduced
"""

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from labs.support.gradient_accumulation.tiny_model import loss_sum


def train_step(model, micro_batches, optimizer, max_norm):
    tokens = tokens_of_all(micro_batches)  # noqa: F821
    total = torch.zeros((), dtype=torch.float64)
    for x, y in micro_batches:
        with model.no_sync():
            loss = loss_sum(model, x, y)
            (loss * dist.get_world_size() / tokens).backward()
        total += loss.detach()
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / tokens
