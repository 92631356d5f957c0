"""config.pbtxt has texts; the settings are numbers.

hint: tp is '2', not a whole number
"""


def settings():
    return {"tp": "2", "slots": "6", "queue": "12"}
