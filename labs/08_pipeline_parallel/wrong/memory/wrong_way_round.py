"""The last rank goes furthest ahead: it waits for micro-batches that nobody sends.

hint: deadlock
"""


def order(rank, ranks, micro_batches):
    ahead = min(rank, micro_batches)
    actions = [("F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            actions.append(("F", ahead + number))
        actions.append(("B", number))
    return actions
