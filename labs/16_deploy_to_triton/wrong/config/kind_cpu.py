"""The server places the instance.

hint: not KIND_MODEL
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace("KIND_MODEL", "KIND_CPU")
