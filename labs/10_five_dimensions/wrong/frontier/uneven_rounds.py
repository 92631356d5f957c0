"""Interleaving goes in rounds of pp micro-batches.

hint: needs micro-batches in multiples of pp
"""


def frontier():
    return Strategy(dp=128, pp=3, tp=8, interleave=4, micro_batch=12, recompute="full")  # noqa: F821
