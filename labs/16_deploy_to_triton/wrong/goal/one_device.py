"""Enough slots, but everything on one device.

hint: a device has 12: 5.77 MiB of weights and 6 slots
"""


def settings():
    return {"tp": 1, "slots": 6, "queue": 12}
