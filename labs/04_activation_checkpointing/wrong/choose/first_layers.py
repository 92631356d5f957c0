"""Takes the first layers until it fits.

hint: fits too and costs
"""


def choose(layers, budget):
    for size in range(len(layers) + 1):
        if peak_bytes(layers, set(range(size))) <= budget:  # noqa: F821
            return set(range(size))
