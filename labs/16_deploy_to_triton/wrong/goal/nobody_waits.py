"""No queue: whoever finds no free slot is refused.

hint: are refused: 6 can run and 0 wait
"""


def settings():
    return {"tp": 2, "slots": 6, "queue": 0}
