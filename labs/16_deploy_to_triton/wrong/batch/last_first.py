"""Who came last joins first.

hint: who came later got a slot earlier
"""


def join(waiting, running, slots):
    taken = []
    for slot in range(slots):
        while waiting and waiting[0].over:
            waiting.popleft()
        if waiting and slot not in running:
            running[slot] = waiting.pop()
            taken.append(slot)
    return taken
