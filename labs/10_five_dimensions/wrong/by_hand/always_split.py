"""Data parallelism alone splits the state.

hint: zero 0 shares out nothing
"""


def state_bytes(parameters, tp, pp, dp, zero):
    return 16 * parameters / (tp * pp * dp)
