"""Goes ahead further than there are micro-batches.

hint: and the last one is
"""


def order(rank, ranks, micro_batches):
    ahead = ranks - 1 - rank
    actions = [("F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            actions.append(("F", ahead + number))
        actions.append(("B", number))
    return actions
