"""The highest free slot is taken: every decode goes over all rows up to it.

hint: the lowest first
"""


def join(waiting, running, slots):
    taken = []
    for slot in reversed(range(slots)):
        while waiting and waiting[0].over:
            waiting.popleft()
        if waiting and slot not in running:
            running[slot] = waiting.popleft()
            taken.append(slot)
    return taken
