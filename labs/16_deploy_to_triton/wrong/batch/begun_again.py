"""The running ones are begun anew in every step.

hint: request
"""

# ruff: noqa: F821


def step(waiting, running, slots, model):
    leave(running)
    join(waiting, running, slots)
    for slot, request in running.items():
        request.begin(model, slot)
