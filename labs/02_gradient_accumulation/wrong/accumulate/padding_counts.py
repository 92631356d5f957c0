"""Counts positions, not tokens that count.

hint: Padding (the target -100) does not count
"""

from labs.support.gradient_accumulation.tiny_model import loss_sum


def accumulate(model, micro_batches):
    losses, tokens = 0.0, 0
    for x, y in micro_batches:
        loss = loss_sum(model, x, y)
        loss.backward()
        losses += loss.item()
        tokens += y.numel()
    return losses, tokens
