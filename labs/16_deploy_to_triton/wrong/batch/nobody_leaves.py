"""Who is over keeps the slot.

hint: must leave before the next decode
"""


def leave(running):
    pass
