"""All-reduces over four nodes in every layer.

hint: tp 32 leaves the node of 8 GPUs
"""


def frontier():
    return Strategy(dp=12, pp=8, tp=32, recompute="full", zero=1, sequence_parallel=True)  # noqa: F821
