"""Slots are counted from 1.

hint: slot 3 of 3
"""


def join(waiting, running, slots):
    taken = []
    for slot in range(1, slots + 1):
        if waiting and slot not in running:
            running[slot] = waiting.popleft()
            taken.append(slot)
    return taken
