"""Shifts targets that are shifted already.

hint: Shifted once too often
"""

# ruff: noqa: F821


def answer_loss(logits, targets):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
