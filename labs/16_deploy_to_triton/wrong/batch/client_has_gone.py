"""Whoever waits gets a slot, also if the client has gone.

hint: had gone while it waited
"""


def join(waiting, running, slots):
    taken = []
    for slot in range(slots):
        if waiting and slot not in running:
            running[slot] = waiting.popleft()
            taken.append(slot)
    return taken
