"""Each W right after its B: gradients travel faster, but the W's fill nothing.

hint: can be reached
"""


def order(rank, ranks, micro_batches):
    ahead = min(ranks - 1 - rank, micro_batches)
    actions = [("F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            actions.append(("F", ahead + number))
        actions += [("B", number), ("W", number)]
    return actions
