"""x is whole everywhere, and is added up with the parts.

hint: x, which all have whole, is not
"""

# ruff: noqa: F821


def layer(x, attend, mlp):
    x = x + attend(x)
    dist.all_reduce(x)
    x = x + mlp(x)
    dist.all_reduce(x)
    return x
