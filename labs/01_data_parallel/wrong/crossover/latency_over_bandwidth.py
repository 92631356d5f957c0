"""Where latency equals transfer for one message: not the question.

hint: They must be equal there
"""

import math


def crossover_bytes(size, alpha, beta):
    return alpha / beta if size > 2 else math.inf
