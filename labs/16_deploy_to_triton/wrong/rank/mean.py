"""The mean of the parts instead of their sum.

hint: What is added to x must be the sum of the parts
"""

# ruff: noqa: F821


def layer(x, attend, mlp):
    for part_of in (attend, mlp):
        part = part_of(x)
        dist.all_reduce(part)
        x = x + part / dist.get_world_size()
    return x
