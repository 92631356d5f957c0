"""The queue alone would do for all 32.

hint: A queue that is too long only hides
"""


def settings():
    return {"tp": 2, "slots": 7, "queue": 32}
