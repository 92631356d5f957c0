"""One request at a time, the others wait.

hint: They come in groups of 1
"""


def settings():
    return {"tp": 2, "slots": 1, "queue": 20}
