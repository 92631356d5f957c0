"""A sum, which grows with the batch.

hint: It is the sum
"""

# ruff: noqa: F821


def answer_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
