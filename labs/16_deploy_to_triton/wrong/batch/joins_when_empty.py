"""Static batching: a batch begins when the one before is over.

hint: when the long one is over. Slots were free
"""

# ruff: noqa: F821

rest = join


def join(waiting, running, slots):
    return rest(waiting, running, slots) if not running else []
