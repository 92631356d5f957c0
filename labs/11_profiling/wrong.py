"""Lab 11c: the wrong program, mended. The notebook hands out the one of your number."""

# hand out your programs in the notebook, then mend yours


def train(machine, steps, watching=None):
    raise NotImplementedError("hand out your programs in the notebook, then mend yours")
