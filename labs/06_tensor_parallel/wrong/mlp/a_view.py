"""The part is a view of the whole matrix, which stays in memory.

hint: is a view
"""

# ruff: noqa: F821


def column(linear, sizes):
    weight, bias = part(linear.weight.data, 0, sizes), part(linear.bias.data, 0, sizes)
    return as_linear(weight, bias)
