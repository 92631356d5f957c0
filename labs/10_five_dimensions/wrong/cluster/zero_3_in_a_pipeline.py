"""ZeRO-3 together with stages.

hint: does not go with pp 8
"""


def cluster():
    return Strategy(dp=16, pp=8, tp=8, recompute="full", zero=3)  # noqa: F821
