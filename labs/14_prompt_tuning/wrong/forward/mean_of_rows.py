"""Each row its mean, then the mean of the rows: short answers weigh more.

hint: a token of a short answer weighs more
"""

# ruff: noqa: F821


def answer_loss(logits, targets):
    rows = [F.cross_entropy(row, target) for row, target in zip(logits, targets)]
    return torch.stack(rows).mean()
