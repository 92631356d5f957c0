"""Lab 01, crossover: each body, written after the solution, is a wrong answer."""


def bandwidth_for_beta():
    """Takes β for bytes per second.

    kind: values
    hint: They must be equal there
    """

    Right = crossover_bytes

    def crossover_bytes(size, alpha, beta):
        return Right(size, alpha, 1 / beta)


def latency_over_bandwidth():
    """Where latency equals transfer for one message: not the question.

    kind: values
    hint: They must be equal there
    """

    def crossover_bytes(size, alpha, beta):
        return alpha / beta if size > 2 else math.inf


def one_way_exchange():
    """Counts an exchange as one message: true only where a rank sends and receives at once.

    kind: values
    hint: They must be equal there
    """

    def crossover_bytes(size, alpha, beta):
        levels = math.ceil(math.log2(size))
        more, fewer = 2 * (size - 1) - 2 * levels, 2 * levels - 2 * (size - 1) / size
        return alpha * more / (beta * fewer) if size > 2 else math.inf


def two_ranks_forgotten():
    """Does not say that with two ranks the ring never wins.

    kind: sizes
    hint: so the answer is math.inf
    """

    Right = crossover_bytes

    def crossover_bytes(size, alpha, beta):
        return Right(size, alpha, beta) if size > 2 else 0.0


def rounded():
    """Rounds log2 N in place of rounding it up.

    kind: sizes
    hint: They must be equal there
    """

    def crossover_bytes(size, alpha, beta):
        levels = round(math.log2(size))
        fewer = 2 * levels - 4 * (size - 1) / size
        return alpha * (4 * (size - 1) - 2 * levels) / (beta * fewer) if fewer > 0 else math.inf


def rounded_down():
    """Full rounds only.

    kind: sizes
    hint: They must be equal there
    """

    def crossover_bytes(size, alpha, beta):
        levels = int(math.log2(size))
        fewer = 2 * levels - 4 * (size - 1) / size
        return alpha * (4 * (size - 1) - 2 * levels) / (beta * fewer) if fewer > 0 else math.inf


def one_round_too_many():
    """Bits of N in place of rounds.

    kind: sizes
    hint: They must be equal there
    """

    def crossover_bytes(size, alpha, beta):
        levels = size.bit_length()
        fewer = 2 * levels - 4 * (size - 1) / size
        return alpha * (4 * (size - 1) - 2 * levels) / (beta * fewer) if size > 2 else math.inf


def four_ranks():
    """Solved for four ranks.

    kind: constants
    hint: They must be equal there
    """

    def crossover_bytes(size, alpha, beta):
        return 8 * alpha / beta if size > 2 else math.inf


def links_of_the_notebook():
    """With the notebook's α and β put in.

    kind: constants
    hint: They must be equal there
    """

    Right = crossover_bytes

    def crossover_bytes(size, alpha, beta):
        return Right(size, 3e-3, 1 / 50e6)


def first_link():
    """Remembers α/β of the first call.

    kind: constants
    hint: They must be equal there
    """

    Right, ratio = crossover_bytes, []

    def crossover_bytes(size, alpha, beta):
        ratio.append(alpha / beta)
        return Right(size, ratio[0], 1.0)


def remembers_sizes():
    """Works out each number of ranks once, with its α and β.

    kind: constants
    hint: They must be equal there
    """

    Right, known = crossover_bytes, {}

    def crossover_bytes(size, alpha, beta):
        return known.setdefault(size, Right(size, alpha, beta))


def a_word():
    """Says it in words.

    kind: types
    hint: which is no number
    """

    Right = crossover_bytes

    def crossover_bytes(size, alpha, beta):
        return f"{Right(size, alpha, beta):.0f} bytes"


def in_kib():
    """Counts in KiB.

    kind: types
    hint: They must be equal there
    """

    Right = crossover_bytes

    def crossover_bytes(size, alpha, beta):
        return Right(size, alpha, beta) / 1024


def latency_only():
    """Messages that the ring has more, and not the bytes that it has fewer.

    kind: part
    hint: They must be equal there
    """

    def crossover_bytes(size, alpha, beta):
        messages = 4 * (size - 1) - 2 * math.ceil(math.log2(size))
        return alpha * messages / beta if size > 2 else math.inf


def searches_for_ever():
    """Doubles until the ring wins: with two ranks it never does.

    kind: end
    hint: an endless loop?
    """

    def crossover_bytes(size, alpha, beta):
        levels, low, n = math.ceil(math.log2(size)), 0, 1
        while 4 * (size - 1) * (alpha + beta * n / size) >= 2 * levels * (alpha + beta * n):
            low, n = n, 2 * n if n < 2**200 else n
        for _ in range(200):
            middle = (low + n) / 2
            ring = 4 * (size - 1) * (alpha + beta * middle / size)
            low, n = (middle, n) if ring >= 2 * levels * (alpha + beta * middle) else (low, middle)
        return n


def power_of_two_in_floats():
    """Takes log2 by dividing logarithms: a little too much for some powers.

    kind: sizes
    hint: They must be equal there
    """

    def crossover_bytes(size, alpha, beta):
        levels = math.ceil(math.log(size) / math.log(2))
        fewer = 2 * levels - 4 * (size - 1) / size
        return alpha * (4 * (size - 1) - 2 * levels) / (beta * fewer) if fewer > 0 else math.inf
