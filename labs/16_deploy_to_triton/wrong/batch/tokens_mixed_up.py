"""The tokens go to the slots in another order than they came.

hint: Do the tokens go to the slots that they came from
"""

# ruff: noqa: F821


def step(waiting, running, slots, model):
    leave(running)
    before = list(running)
    for slot in join(waiting, running, slots):
        running[slot].begin(model, slot)
    if before:
        tokens = model.decode(before, [running[slot].last for slot in before])
        for slot, token in zip(reversed(before), tokens):
            running[slot].add(token)
