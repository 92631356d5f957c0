"""Recomputes nothing.

hint: above the budget of
"""


def choose(layers, budget):
    return set()
