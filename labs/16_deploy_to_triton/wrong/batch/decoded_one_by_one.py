"""Each running request gets a decode of its own.

hint: decodes of one row each
"""

# ruff: noqa: F821


def step(waiting, running, slots, model):
    leave(running)
    before = list(running)
    for slot in join(waiting, running, slots):
        running[slot].begin(model, slot)
    for slot in before:
        running[slot].add(model.decode([slot], [running[slot].last])[0])
