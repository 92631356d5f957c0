"""A number is missing.

hint: not a dictionary of tp, slots, queue
"""


def settings():
    return {"tp": 2, "slots": 6}
