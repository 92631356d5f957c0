"""Hands the end to the model, too: a column more.

hint: less its last token
"""

# ruff: noqa: F821

right_batch = batch


def batch(pairs, end):
    tokens, targets = right_batch(pairs, end)
    return F.pad(tokens, (0, 1), value=end), F.pad(targets, (0, 1), value=IGNORED)
