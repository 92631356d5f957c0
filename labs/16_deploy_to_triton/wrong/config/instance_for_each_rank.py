"""An instance for each rank: each starts all ranks.

hint: there are 2 instances
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace("count: 1", f"count: {tp}")
