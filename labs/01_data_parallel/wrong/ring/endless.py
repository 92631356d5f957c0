"""A loop that never ends.

hint: an endless loop?
"""


def ring_all_reduce(tensor):
    step = 0
    while step < dist.get_world_size():  # noqa: F821
        pass
