"""What fits one device are two slots: two tokens a step.

hint: They come in groups of 2
"""


def settings():
    return {"tp": 1, "slots": 2, "queue": 18}
