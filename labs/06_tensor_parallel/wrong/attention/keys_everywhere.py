"""Every rank gets all key-value heads.

hint: A rank has whole heads
"""

# ruff: noqa: F821


def head_sizes(heads, kv_heads, head_size):
    size = dist.get_world_size()
    keys = tuple(n * head_size for n in shares(kv_heads, size))
    return tuple(n * heads // kv_heads for n in keys), (kv_heads * head_size,) * size
