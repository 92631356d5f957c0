"""Splits weights first and the optimizer last.

hint: the optimizer's 12 bytes over the
"""


def state_bytes(parameters, tp, pp, dp, zero):
    weight = 2 / (dp if zero >= 1 else 1)
    gradient = 2 / (dp if zero >= 2 else 1)
    optimizer = 12 / (dp if zero >= 3 else 1)
    return parameters / (tp * pp) * (weight + gradient + optimizer)
