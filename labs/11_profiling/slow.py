"""Lab 11a: the slow program, mended. The notebook hands out the one of your number."""

# hand out your programs in the notebook, then mend yours


def train(machine, steps, after=lambda model: None):
    raise NotImplementedError("hand out your programs in the notebook, then mend yours")
