"""One request at a time, the others wait.

hint: decodes of one row each
"""

# ruff: noqa: F821

rest = join


def join(waiting, running, slots):
    return rest(waiting, running, 1)
