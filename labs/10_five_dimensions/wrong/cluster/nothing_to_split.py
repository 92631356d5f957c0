"""Sequence parallelism without tensor parallelism.

hint: tp is 1
"""


def cluster():
    return Strategy(dp=64, pp=16, recompute="full", zero=1, sequence_parallel=True)  # noqa: F821
