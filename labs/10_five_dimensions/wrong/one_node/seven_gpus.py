"""Leaves a GPU idle.

hint: there are 8 GPUs: all of them must work
"""


def one_node():
    return Strategy(dp=7, zero=3, recompute="full")  # noqa: F821
