"""Only attention's parts are added up.

hint: the tokens are not those of the whole model
"""

# ruff: noqa: F821


def layer(x, attend, mlp):
    part = attend(x)
    dist.all_reduce(part)
    x = x + part
    return x + mlp(x)
