"""Of those who run, two get a token; the third waits until one is over.

hint: at most 2 of 3 slots
"""

# ruff: noqa: F821


def step(waiting, running, slots, model):
    leave(running)
    before = list(running)[:2]
    for slot in join(waiting, running, slots):
        running[slot].begin(model, slot)
    if before:
        tokens = model.decode(before, [running[slot].last for slot in before])
        for slot, token in zip(before, tokens):
            running[slot].add(token)
