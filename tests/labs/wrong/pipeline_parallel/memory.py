"""Lab 08, memory: each body, written after the solution, is a wrong answer."""


def all_forward_first():
    """GPipe: all forward passes, then all backward passes.

    hint: would do
    """

    def order(rank, ranks, micro_batches):
        return gpipe(rank, ranks, micro_batches)


def backward_first():
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


def never_emptied():
    """Forgets the backward passes of what is still in flight at the end.

    hint: never does B
    """

    def order(rank, ranks, micro_batches):
        ahead = min(ranks - 1 - rank, micro_batches)
        actions = [("F", number) for number in range(ahead)]
        for number in range(micro_batches - ahead):
            actions += [("F", ahead + number), ("B", number)]
        return actions


def newest_first():
    """The newest micro-batch's backward pass first, as on a stack: gradients come in another order.

    hint: in another order
    """

    def order(rank, ranks, micro_batches):
        ahead = min(ranks - 1 - rank, micro_batches)
        actions, open_ones = [("F", number) for number in range(ahead)], list(range(ahead))
        for number in range(ahead, micro_batches):
            actions += [("F", number), ("B", number)]
        return actions + [("B", number) for number in reversed(open_ones)]


def nothing_ahead():
    """One forward, one backward from the start: the first rank waits for each gradient.

    hint: too few F's ahead
    """

    def order(rank, ranks, micro_batches):
        return [(kind, number) for number in range(micro_batches) for kind in "FB"]


def same_for_all():
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


def too_few_micro_batches():
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


def wrong_way_round():
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
