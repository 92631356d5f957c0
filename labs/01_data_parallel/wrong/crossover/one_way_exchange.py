"""Counts an exchange as one message: true only where a rank sends and receives at once.

hint: They must be equal there
"""

import math


def crossover_bytes(size, alpha, beta):
    levels = math.ceil(math.log2(size))
    more, fewer = 2 * (size - 1) - 2 * levels, 2 * levels - 2 * (size - 1) / size
    return alpha * more / (beta * fewer) if size > 2 else math.inf
