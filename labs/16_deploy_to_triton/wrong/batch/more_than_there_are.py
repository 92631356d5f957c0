"""As many join as wait.

hint: slot 3 of 3
"""


def join(waiting, running, slots):
    taken = []
    while waiting:
        slot = min(set(range(100)) - set(running))
        running[slot] = waiting.popleft()
        taken.append(slot)
    return taken
