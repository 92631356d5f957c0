"""Exactly one token may come.

hint: the input input_ids has the dims [1], not [-1]
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace("dims: [ -1 ] }", "dims: [ 1 ] }")
