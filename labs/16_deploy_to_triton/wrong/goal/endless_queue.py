"""Everybody may wait.

hint: 0 are refused, 8 is the least: the last waits 5 turns
"""


def settings():
    return {"tp": 2, "slots": 6, "queue": 1000}
