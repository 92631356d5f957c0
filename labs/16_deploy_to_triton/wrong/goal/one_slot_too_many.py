"""The weights were forgotten: 8 slots alone would fit.

hint: 8 slots of 1.25 MiB
"""


def settings():
    return {"tp": 2, "slots": 8, "queue": 12}
