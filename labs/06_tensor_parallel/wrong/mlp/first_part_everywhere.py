"""Every rank takes the first part.

hint: holds another rank's part
"""

# ruff: noqa: F821


def column(linear, sizes):
    first = sizes[dist.get_rank()]
    return as_linear(linear.weight.data[:first].clone(), linear.bias.data[:first].clone())
