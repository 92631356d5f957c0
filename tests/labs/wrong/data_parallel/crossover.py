"""Lab 01, crossover: each body, written after the solution, is a wrong answer."""


def bandwidth_for_beta():
    """Takes β for bytes per second.

    hint: They must be equal there
    """

    Right = crossover_bytes

    def crossover_bytes(size, alpha, beta):
        return Right(size, alpha, 1 / beta)


def latency_over_bandwidth():
    """Where latency equals transfer for one message: not the question.

    hint: They must be equal there
    """

    def crossover_bytes(size, alpha, beta):
        return alpha / beta if size > 2 else math.inf


def one_way_exchange():
    """Counts an exchange as one message: true only where a rank sends and receives at once.

    hint: They must be equal there
    """

    def crossover_bytes(size, alpha, beta):
        levels = math.ceil(math.log2(size))
        more, fewer = 2 * (size - 1) - 2 * levels, 2 * levels - 2 * (size - 1) / size
        return alpha * more / (beta * fewer) if size > 2 else math.inf


def two_ranks_forgotten():
    """Does not say that with two ranks the ring never wins.

    hint: so the answer is math.inf
    """

    Right = crossover_bytes

    def crossover_bytes(size, alpha, beta):
        return Right(size, alpha, beta) if size > 2 else 0.0
