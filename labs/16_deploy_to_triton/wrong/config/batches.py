"""The server adds a batch dimension.

hint: the server adds a dimension in front
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace("max_batch_size: 0", "max_batch_size: 8")
