"""ZeRO-3 and full recomputation: it fits easily, and computes a third more.

hint: activations are computed again although there is room
"""


def one_node():
    return Strategy(dp=8, zero=3, recompute="full", micro_batch=8)  # noqa: F821
