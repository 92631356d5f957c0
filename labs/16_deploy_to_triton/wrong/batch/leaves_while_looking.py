"""A dict must not change while one goes through it.

hint: dictionary changed size during iteration
"""


def leave(running):
    for slot, request in running.items():
        if request.over:
            del running[slot]
