"""Recomputes every layer.

hint: it fits without recomputing it
"""


def choose(layers, budget):
    return set(range(len(layers)))
