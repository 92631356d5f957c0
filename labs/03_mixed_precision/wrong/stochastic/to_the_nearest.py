"""Rounds as usual.

hint: always rounded
"""


def round_stochastically(x, generator):
    return x.bfloat16()
