"""Every request must say how much it wants.

hint: the input max_tokens may be left out: optional: true
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace("dims: [ 1 ] optional: true", "dims: [ 1 ]")
