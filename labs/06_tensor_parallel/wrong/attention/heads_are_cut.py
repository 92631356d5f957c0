"""Shares out columns, so that a head lies on two ranks.

hint: A rank has whole heads
"""

# ruff: noqa: F821


def head_sizes(heads, kv_heads, head_size):
    size = dist.get_world_size()
    return shares(heads * head_size, size), shares(kv_heads * head_size, size)
