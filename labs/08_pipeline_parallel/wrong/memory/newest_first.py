"""The newest micro-batch's backward pass first, as on a stack: gradients come in another order.

hint: in another order
"""


def order(rank, ranks, micro_batches):
    ahead = min(ranks - 1 - rank, micro_batches)
    actions, open_ones = [("F", number) for number in range(ahead)], list(range(ahead))
    for number in range(ahead, micro_batches):
        actions += [("F", number), ("B", number)]
    return actions + [("B", number) for number in reversed(open_ones)]
