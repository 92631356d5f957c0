"""All W's at the end: every micro-batch is kept until then.

hint: until it is done its micro-batch is kept
"""


def order(rank, ranks, micro_batches):
    ahead = min(ranks - 1 - rank, micro_batches)
    actions = [("F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            actions.append(("F", ahead + number))
        actions.append(("B", number))
    return actions + [("W", number) for number in range(micro_batches)]
