"""Takes β for bytes per second.

hint: They must be equal there
"""

Right = crossover_bytes  # noqa: F821


def crossover_bytes(size, alpha, beta):
    return Right(size, alpha, 1 / beta)
