"""Eight stages and few large micro-batches.

hint: stages wait
"""


def one_node():
    return Strategy(pp=8, micro_batch=16, recompute="full")  # noqa: F821
