"""Counts the tokens of this rank only.

hint: tokens_of_all returns
"""

from tiny import counted


def tokens_of_all(micro_batches):
    return sum(counted(y) for _, y in micro_batches)
