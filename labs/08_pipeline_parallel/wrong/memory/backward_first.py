"""In turns, but the backward pass before its own forward pass on the last rank.

hint: waits for F0 of rank
"""


def order(rank, ranks, micro_batches):
    ahead = min(ranks - 1 - rank, micro_batches)
    actions = [("F", number) for number in range(ahead)]
    for number in range(micro_batches):
        actions.append(("B", number))
        if ahead + number < micro_batches:
            actions.append(("F", ahead + number))
    return actions
