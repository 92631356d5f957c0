"""Does W's while forward passes last, and forgets those that are left.

hint: never does W
"""


def order(rank, ranks, micro_batches):
    ahead = min(ranks - 1 - rank, micro_batches)
    actions, done = [("F", number) for number in range(ahead)], 0
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            actions.append(("F", ahead + number))
        actions.append(("B", number))
        if ahead + number + 1 - done >= ranks and number < micro_batches - 1:
            actions.append(("W", done))
            done += 1
    return actions
