"""Expects as many rows as it sends itself.

hint: who tells it the others'?
"""


def tell(counts):
    return counts.view(dist.get_world_size(), -1)  # noqa: F821
