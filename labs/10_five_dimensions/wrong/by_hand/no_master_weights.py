"""Forgets the fp32 copy of the weights.

hint: 2 + 2 + 12 bytes
"""


def state_bytes(parameters, tp, pp, dp, zero):
    weight = 2 / (dp if zero >= 3 else 1)
    gradient = 2 / (dp if zero >= 2 else 1)
    optimizer = 8 / (dp if zero >= 1 else 1)
    return parameters / (tp * pp) * (weight + gradient + optimizer)
