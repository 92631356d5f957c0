"""Nothing is cut; every rank computes the whole layer.

hint: and this rank's part is
"""

# ruff: noqa: F821


def column(linear, sizes):
    return as_linear(linear.weight.data.clone(), linear.bias.data.clone())


row = column
