"""Works it out and forgets to return it.

hint: is None, and
"""


def state_bytes(parameters, tp, pp, dp, zero):
    16 * parameters / (tp * pp)
