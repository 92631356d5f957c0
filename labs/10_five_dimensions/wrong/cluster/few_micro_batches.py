"""16 stages and 24 micro-batches.

hint: stages wait
"""


def cluster():
    return Strategy(dp=8, pp=16, tp=8, micro_batch=8, recompute="full", zero=1)  # noqa: F821
