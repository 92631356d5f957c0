"""Recomputes as few layers as possible, however much they compute.

hint: fits too and costs
"""


def choose(layers, budget):
    numbers = range(len(layers))
    for size in range(len(layers) + 1):
        for chosen in combinations(numbers, size):  # noqa: F821
            if peak_bytes(layers, set(chosen)) <= budget:  # noqa: F821
                return set(chosen)
