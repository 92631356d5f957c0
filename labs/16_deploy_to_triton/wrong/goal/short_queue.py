"""The queue was chosen without the slots.

hint: are refused: 4 can run and 8 wait
"""


def settings():
    return {"tp": 2, "slots": 4, "queue": 8}
