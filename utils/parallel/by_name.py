"""Tensor parallelism for any model, by the names of its matrices.

    split_by_name(bert, mesh.tp, columns=["*.query", "*.key", "*.value", "*.intermediate.dense"],
                  rows=["*.attention.output.dense", "*.layer.*.output.dense"])

Works where the model's code takes the number of heads from the shapes. Every column matrix has an
f of its own, because this file does not know which of them read the same input; so the backward
pass makes more all-reduces than `tensor_parallel` does, and the values are the same.
"""

from fnmatch import fnmatchcase

from torch import nn

from utils.parallel.tensor import column, row
from utils.parallel.tp_ops import Region, enter


def split_by_name(model, axis, columns, rows):
    """Splits the nn.Linears whose names match a pattern, in place; returns the model.

    Raises ValueError for a pattern that matches nothing, and for sizes that `axis` does not divide
    (a head might be cut).
    """
    if axis.size == 1:
        return model
    region = Region(axis)
    for patterns, split in ((columns, _split_column), (rows, _split_row)):
        for pattern in patterns:
            found = [
                name
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear) and fnmatchcase(name, pattern)
            ]
            if not found:
                raise ValueError(f"no linear layer has a name like {pattern!r}")
            for name in found:
                split(model, name, region)
    return model


def _split_column(model, name, region):
    linear = model.get_submodule(name)
    _check(name, linear.out_features, "outputs", region.axis)
    column(linear, region.axis)
    linear.register_forward_pre_hook(lambda module, args: (enter(args[0], region.axis), *args[1:]))


def _split_row(model, name, region):
    linear = model.get_submodule(name)
    _check(name, linear.in_features, "inputs", region.axis)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, row(linear, region))


def _check(name, size, what, axis):
    if size % axis.size:
        raise ValueError(f"{axis.name} {axis.size} does not divide the {size} {what} of {name}")
