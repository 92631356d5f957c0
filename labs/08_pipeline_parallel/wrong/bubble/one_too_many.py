"""Lets one W more wait than the memory holds.

hint: keeps
"""


def order(rank, ranks, micro_batches):
    ahead = min(ranks - 1 - rank, micro_batches)
    actions, begun, done = [("F", number) for number in range(ahead)], ahead, 0
    for number in range(micro_batches):
        if begun < micro_batches:
            actions.append(("F", begun))
            begun += 1
        actions.append(("B", number))
        if begun - done == ranks + 1 or begun == micro_batches:
            actions.append(("W", done))
            done += 1
    return actions + [("W", number) for number in range(done, micro_batches)]
