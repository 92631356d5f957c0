"""Each rank adds its own part.

hint: The ranks say nothing to each other
"""


def layer(x, attend, mlp):
    x = x + attend(x)
    return x + mlp(x)
