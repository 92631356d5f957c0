"""Gathers all weights for every micro-batch.

hint: Most is lost by dp
"""


def cluster():
    return Strategy(dp=512, tp=2, recompute="full", zero=3)  # noqa: F821
