"""Fills up the targets with the end, as the tokens: every end is to be said.

hint: goes over the filling
"""

# ruff: noqa: F821

right_batch = batch


def batch(pairs, end):
    tokens, targets = right_batch(pairs, end)
    for row in targets:
        last = (row != IGNORED).nonzero().max()
        row[last + 1 :] = end
    return tokens, targets
