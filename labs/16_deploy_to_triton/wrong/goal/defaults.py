"""The engine's defaults.

hint: MiB and a device has 12: 2.89 MiB of weights and 16 slots
"""


def settings():
    return {"tp": 2, "slots": 16, "queue": 64}
