"""Lab 11b: the hanging program, fixed. The notebook hands out the one with your number."""

# hand out your programs in the notebook, then fix yours


def train(machine, steps):
    raise NotImplementedError("hand out your programs in the notebook, then fix yours")
