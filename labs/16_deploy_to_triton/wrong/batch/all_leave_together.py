"""Static batching: the slots are free when all of them are.

hint: request
"""


def leave(running):
    if all(request.over for request in running.values()):
        running.clear()
