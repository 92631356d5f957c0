"""Every place counts: what is IGNORED becomes the word 0.

hint: Which targets count?
"""

# ruff: noqa: F821


def answer_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten())
