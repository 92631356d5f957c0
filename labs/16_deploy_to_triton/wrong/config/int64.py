"""The tokens have Python's width, not the client's.

hint: the input input_ids has the type INT64, and clients send INT32
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace("TYPE_INT32 dims: [ -1 ] }", "TYPE_INT64 dims: [ -1 ] }")
