"""Does not say that with two ranks the ring never wins.

hint: so the answer is math.inf
"""

Right = crossover_bytes  # noqa: F821


def crossover_bytes(size, alpha, beta):
    return Right(size, alpha, beta) if size > 2 else 0.0
