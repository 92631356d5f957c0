"""Returns numbers of heads where numbers of outputs are asked for.

hint: A rank has whole heads
"""

# ruff: noqa: F821


def head_sizes(heads, kv_heads, head_size):
    keys = shares(kv_heads, dist.get_world_size())
    return tuple(n * heads // kv_heads for n in keys), keys
