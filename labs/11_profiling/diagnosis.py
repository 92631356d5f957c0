"""Lab 11: what is wrong with your three programs, as data.

Measure, then write down what you have found: each function is one `return` of a dictionary with
numbers, texts and None. It is read, and nothing in it runs. Lines are those of broken/*.py. A rank,
a step or a name that is not one but all of them is None.
"""

# write NUMBER = your number: the one that you were given, or any up to 999999
NUMBER = None


def slow() -> dict:
    """What makes broken/slow.py slow, two things.

    rank            the one that the others wait for
    line            where that rank calls what takes the time
    cause           "data loading", "checkpoints", "logging" or "health checks"
    ms              that it costs, a step (25 % off, or 8 ms, is near enough)
    message_line    where messages are sent, or made, that need not be
    message_cause   "one for each parameter", "one for each micro-batch", "more than the gradients",
                    "the loss of each micro-batch" or "barriers"
    message_calls   collectives that a rank calls in a step, all together
    message_bytes   that it hands over in them, a step (1 % off is near enough)
    """
    raise NotImplementedError("return a dictionary with these 8 keys, written out")


def hanging() -> dict:
    """Who makes broken/hanging.py stand still.

    rank    the one that has gone another way than the others
    line    where it did: the line that decides, or the one that is done or left out for it
    waits   the line of the collective in which the others wait
    cause   "skips a collective", "decides alone", "leaves the loop", "another order" or
            "calls it alone"
    """
    raise NotImplementedError("return a dictionary with these 4 keys, written out")


def wrong() -> dict:
    """Where broken/wrong.py first computes something else than one rank does.

    rank    the one that goes wrong; None: no single one
    step    of the first number that is wrong: a weight, or a gradient
    name    of the parameter that is wrong first; None: all of them at once
    line    where it goes wrong
    cause   "weights not sent", "gradient not reduced", "sum not divided", "clipped alone" or
            "step left out alone"
    """
    raise NotImplementedError("return a dictionary with these 5 keys, written out")
