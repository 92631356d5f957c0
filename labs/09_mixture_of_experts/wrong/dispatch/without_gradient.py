"""Sends rows past autograd.

hint: Rows must travel through AllToAll.apply
"""

_dispatch = dispatch  # noqa: F821


def dispatch(tokens, chosen, experts):
    rows, way = _dispatch(tokens.detach(), chosen, experts)
    return rows, way
