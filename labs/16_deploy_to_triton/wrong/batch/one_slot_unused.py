"""A slot is left free.

hint: at most 2 of 3 slots take part
"""

# ruff: noqa: F821

rest = join


def join(waiting, running, slots):
    return rest(waiting, running, slots - 1)
