"""Forgets the backward passes of what is still in flight at the end.

hint: never does B
"""


def order(rank, ranks, micro_batches):
    ahead = min(ranks - 1 - rank, micro_batches)
    actions = [("F", number) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        actions += [("F", ahead + number), ("B", number)]
    return actions
