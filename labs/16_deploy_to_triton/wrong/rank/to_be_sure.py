"""A third sum, of something that is equal already.

hint: 15 all-reduces in 5 layers; 10 will do
"""

# ruff: noqa: F821


def layer(x, attend, mlp):
    for part_of in (attend, mlp):
        part = part_of(x)
        dist.all_reduce(part)
        x = x + part
    x = x.contiguous()
    dist.all_reduce(x)
    return x / dist.get_world_size()
