"""Only rank 0 gets the sum; the other goes on with its part.

hint: the tokens are not those of the whole model
"""

# ruff: noqa: F821


def layer(x, attend, mlp):
    for part_of in (attend, mlp):
        part = part_of(x).contiguous()
        dist.reduce(part, 0)
        x = x + part
    return x
