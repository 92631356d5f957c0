"""Says that it is impossible, but not what would be possible.

hint: does not name the smallest possible budget
"""

solved = choose  # noqa: F821


def choose(layers, budget):
    try:
        return solved(layers, budget)
    except ValueError:
        raise ValueError("the budget is too small") from None
