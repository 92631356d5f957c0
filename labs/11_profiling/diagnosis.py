"""Lab 11: what is wrong with your three programs, as data.

Measure, then write down what you find: each function is one `return` of a dictionary of numbers,
strings and None. The file is only read, never run. Lines are those of broken/*.py. Write None for a
rank, step or name if it is all of them.
"""

# write NUMBER = your number: the one you were given, or any up to 999999
NUMBER = None


def slow() -> dict:
    """The two things that make broken/slow.py slow.

    rank            the rank that the others wait for
    line            where that rank calls the slow operation
    cause           "data loading", "checkpoints", "logging" or "health checks"
    ms              its cost per step (within 25 %, or 8 ms, is close enough)
    message_line    where unnecessary messages are sent or created
    message_cause   "one for each parameter", "one for each micro-batch", "more than the gradients",
                    "the loss of each micro-batch" or "barriers"
    message_calls   collectives that a rank calls per step, in total
    message_bytes   bytes that it passes to them per step (within 1 % is close enough)
    """
    raise NotImplementedError("return a dictionary with these 8 keys, written out")


def hanging() -> dict:
    """The rank that makes broken/hanging.py hang.

    rank    the rank that took a different path
    line    where it did: the line that decides, or the line that only it runs or skips
    waits   the line of the collective in which the others wait
    cause   "skips a collective", "decides alone", "leaves the loop", "another order" or
            "calls it alone"
    """
    raise NotImplementedError("return a dictionary with these 4 keys, written out")


def wrong() -> dict:
    """Where broken/wrong.py first differs from a run on one rank.

    rank    the rank that goes wrong; None: no single one
    step    of the first wrong value: a weight or a gradient
    name    of the parameter that is wrong first; None: all of them at once
    line    where it goes wrong
    cause   "weights not sent", "gradient not reduced", "sum not divided", "clipped alone" or
            "step left out alone"
    """
    raise NotImplementedError("return a dictionary with these 5 keys, written out")
