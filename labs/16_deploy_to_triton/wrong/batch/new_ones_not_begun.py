"""Who joins is decoded, without ever having been read.

hint: IndexError
"""

# ruff: noqa: F821


def step(waiting, running, slots, model):
    leave(running)
    join(waiting, running, slots)
    if running:
        tokens = model.decode(list(running), [request.last for request in running.values()])
        for request, token in zip(running.values(), tokens):
            request.add(token)
