"""Lab 11b: the hanging program, mended. The notebook hands out the one of your number."""

# hand out your programs in the notebook, then mend yours


def train(machine, steps):
    raise NotImplementedError("hand out your programs in the notebook, then mend yours")
