"""A head cannot be divided.

hint: the export refuses tp 4
"""


def settings():
    return {"tp": 4, "slots": 12, "queue": 12}
