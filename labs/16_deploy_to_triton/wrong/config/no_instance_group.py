"""The server chooses: one instance for each GPU.

hint: not KIND_MODEL
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace("instance_group [ { kind: KIND_MODEL count: 1 } ]", "")
