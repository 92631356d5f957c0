"""Forgets that the first stage works ahead.

hint: micro-batches are under way when
"""


def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
    return 2 * micro_batch * seq * hidden * math.ceil(layers / pp)  # noqa: F821
