"""Lab 08, bubble: each body, written after the solution, is a wrong answer."""


def all_at_the_end():
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


def before_b():
    """A W before its own B.

    hint: waits for B
    """

    def order(rank, ranks, micro_batches):
        ahead = min(ranks - 1 - rank, micro_batches)
        actions = [("F", number) for number in range(ahead)]
        for number in range(micro_batches):
            if ahead + number < micro_batches:
                actions.append(("F", ahead + number))
            actions += [("W", number), ("B", number)]
        return actions


def no_weight_actions():
    """1F1B as it was.

    hint: there is no W
    """

    def order(rank, ranks, micro_batches):
        ahead = min(ranks - 1 - rank, micro_batches)
        actions = [("F", number) for number in range(ahead)]
        for number in range(micro_batches):
            if ahead + number < micro_batches:
                actions.append(("F", ahead + number))
            actions.append(("B", number))
        return actions


def one_too_many():
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


def right_after_b():
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


def some_forgotten():
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
