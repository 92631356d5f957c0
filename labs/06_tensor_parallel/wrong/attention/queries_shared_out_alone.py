"""Shares out the query heads without looking at the key-value heads.

hint: the query heads that attend to its key-value heads
"""

# ruff: noqa: F821


def head_sizes(heads, kv_heads, head_size):
    size = dist.get_world_size()
    queries, keys = shares(heads, size), shares(kv_heads, size)
    return tuple(n * head_size for n in queries), tuple(n * head_size for n in keys)
