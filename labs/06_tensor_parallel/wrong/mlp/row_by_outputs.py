"""Cuts the row layer along its outputs, too.

hint: a row layer along its inputs
"""

# ruff: noqa: F821


def row(linear, sizes):
    size = dist.get_world_size()
    weight = part(linear.weight.data, 0, shares(linear.out_features, size)).clone()
    return as_linear(weight, linear.bias.data)
