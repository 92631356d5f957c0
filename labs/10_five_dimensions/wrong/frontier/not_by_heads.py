"""160 heads are not shared out over 64 ranks.

hint: does not divide the 160 heads
"""


def frontier():
    return Strategy(dp=3, pp=16, tp=64, recompute="full")  # noqa: F821
