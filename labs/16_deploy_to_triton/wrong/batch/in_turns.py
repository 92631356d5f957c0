"""The running ones get their tokens in turns, everybody in every second step.

hint: decode steps; 39 will do
"""

# ruff: noqa: F821

turn = [0]


def step(waiting, running, slots, model):
    leave(running)
    before = list(running)
    turn[0] += 1
    if len(before) < slots and turn[0] % 2:
        return
    for slot in join(waiting, running, slots):
        running[slot].begin(model, slot)
    if len(before) == slots and turn[0] % 2:
        before = before[1:]
    if before:
        tokens = model.decode(before, [running[slot].last for slot in before])
        for slot, token in zip(before, tokens):
            running[slot].add(token)
