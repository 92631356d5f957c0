"""Lab 11c: the wrong program, fixed. The notebook hands out the one with your number."""

# hand out your programs in the notebook, then fix yours


def train(machine, steps, watching=None):
    raise NotImplementedError("hand out your programs in the notebook, then fix yours")
