"""Every rank goes as far ahead as the first one.

hint: would do
"""


def order(rank, ranks, micro_batches):
    ahead = min(ranks, micro_batches)
    actions = [("F", number) for number in range(ahead)]
    for number in range(micro_batches):
        actions.append(("B", number))
        if ahead + number < micro_batches:
            actions.append(("F", ahead + number))
    return actions
