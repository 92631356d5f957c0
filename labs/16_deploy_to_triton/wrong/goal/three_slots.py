"""Nearly enough slots.

hint: They come in groups of 3
"""


def settings():
    return {"tp": 2, "slots": 3, "queue": 16}
