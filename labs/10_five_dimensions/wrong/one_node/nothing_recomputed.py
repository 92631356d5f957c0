"""Keeps all activations of two sequences.

hint: Most are activations
"""


def one_node():
    return Strategy(dp=4, tp=2, micro_batch=4, zero=1, sequence_parallel=True)  # noqa: F821
