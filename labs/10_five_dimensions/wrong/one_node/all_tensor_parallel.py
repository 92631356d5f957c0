"""Cuts the matrices into eight parts, one sequence at a time.

hint: Most is lost by
"""


def one_node():
    return Strategy(tp=8, recompute="full")  # noqa: F821
