"""Lab 11a: the slow program, fixed. The notebook hands out the one with your number."""

# hand out your programs in the notebook, then fix yours


def train(machine, steps, after=lambda model: None):
    raise NotImplementedError("hand out your programs in the notebook, then fix yours")
