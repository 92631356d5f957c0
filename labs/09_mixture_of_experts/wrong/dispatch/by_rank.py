"""Leaves the rows in the order in which they came.

hint: they came rank by rank
"""

_dispatch = dispatch  # noqa: F821


def dispatch(tokens, chosen, experts):
    rows, way = _dispatch(tokens, chosen, experts)
    return rows[way.by_expert.argsort()], way
