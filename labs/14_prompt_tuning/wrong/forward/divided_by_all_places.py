"""Adds up the right losses and divides by all places of the batch.

hint: divided by all B·T places
"""

# ruff: noqa: F821


def answer_loss(logits, targets):
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.mean()
