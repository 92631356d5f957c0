"""256 stages for 128 layers.

hint: some stage would be empty
"""


def frontier():
    return Strategy(dp=3, pp=256, tp=4, recompute="full", zero=1)  # noqa: F821
