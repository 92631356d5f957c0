"""Uses 1,024 GPUs.

hint: there are 3072 GPUs
"""


def frontier():
    return Strategy(  # noqa: F821
        dp=4, pp=32, tp=8, interleave=4, recompute="selective", zero=1, sequence_parallel=True
    )
