"""Two leaders, each with ranks of its own.

hint: One process group is one instance
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace("count: 1", "count: 2")
