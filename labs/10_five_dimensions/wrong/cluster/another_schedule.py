"""Chooses what is not asked for.

hint: the schedule is 1f1b
"""


def cluster():
    return Strategy(dp=16, pp=8, tp=8, recompute="full", zero=1, schedule="zero-bubble")  # noqa: F821
