"""The sum travels in twice the bytes.

hint: bytes were handed over
"""

# ruff: noqa: F821


def layer(x, attend, mlp):
    for part_of in (attend, mlp):
        part = part_of(x).double()
        dist.all_reduce(part)
        x = x + part.float()
    return x
