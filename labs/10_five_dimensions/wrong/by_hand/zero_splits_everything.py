"""Any stage shares out all 16 bytes.

hint: zero 1 shares out the optimizer's 12 bytes
"""


def state_bytes(parameters, tp, pp, dp, zero):
    return 16 * parameters / (tp * pp) / (dp if zero else 1)
