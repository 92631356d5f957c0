"""Lab 08, bubble: each body, written after the solution, is a wrong answer."""


def all_at_the_end():
    """All W's at the end: every micro-batch is kept until then.

    kind: memory
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

    kind: step
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

    kind: part
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

    kind: memory
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

    kind: work
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

    kind: part
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


def library():
    """The course's own.

    kind: library
    hint: that is the library
    """

    def order(rank, ranks, micro_batches):
        from utils.parallel import schedules

        return schedules.schedule("zero-bubble", ranks, micro_batches)[rank]


def library_by_another_name():
    """The course's own, its name put together.

    kind: library
    hint: that is the library
    """

    def order(rank, ranks, micro_batches):
        library = __import__("util" + "s.parallel.schedules", fromlist=["x"])
        return list(library._zero_bubble(rank, ranks, micro_batches, 1))


def up_to_eight_ranks():
    """Right for up to 8 ranks.

    kind: sizes
    hint: can be reached
    """

    solved = order

    def order(rank, ranks, micro_batches):
        if ranks <= 8:
            return solved(rank, ranks, micro_batches)
        ahead = min(ranks - 1 - rank, micro_batches)
        actions = [("F", number) for number in range(ahead)]
        for number in range(micro_batches):
            if ahead + number < micro_batches:
                actions.append(("F", ahead + number))
            actions += [("B", number), ("W", number)]
        return actions


def forty_micro_batches():
    """Leaves what comes after the fortieth.

    kind: sizes
    hint: never does
    """

    solved = order

    def order(rank, ranks, micro_batches):
        return [a for a in solved(rank, ranks, micro_batches) if a[1] < 40]


def first_pipeline_for_ever():
    """Remembers the lists of the first number of ranks that it was asked for.

    kind: constants
    hint: in another | a second time
    """

    solved, lists = order, {}

    def order(rank, ranks, micro_batches):
        if (rank, micro_batches) not in lists:
            lists[rank, micro_batches] = solved(rank, ranks, micro_batches)
        return lists[rank, micro_batches]


def by_chance():
    """Throws a coin for each W.

    kind: luck
    hint: in another | a second time
    """

    def order(rank, ranks, micro_batches):
        import random

        ahead, done = min(ranks - 1 - rank, micro_batches), 0
        actions = [("F", number) for number in range(ahead)]
        for number in range(micro_batches):
            if ahead + number < micro_batches:
                actions.append(("F", ahead + number))
            actions.append(("B", number))
            if random.random() < 0.5:
                actions.append(("W", done))
                done += 1
        return actions + [("W", number) for number in range(done, micro_batches)]


def one_rank_only():
    """Has nothing to do where there is one rank.

    kind: odd
    hint: there is no W
    """

    solved = order

    def order(rank, ranks, micro_batches):
        actions = solved(rank, ranks, micro_batches)
        return [a for a in actions if a[0] != "W"] if ranks == 1 else actions


def numbers_as_text():
    """Actions in one word.

    kind: types
    hint: is not a list of (kind, number) | , not a list of (kind, number)
    """

    solved = order

    def order(rank, ranks, micro_batches):
        return [f"{kind}{number}" for kind, number in solved(rank, ranks, micro_batches)]


def waits_in_a_circle():
    """The first rank wants its gradients as the last one does.

    kind: end
    hint: deadlock
    """

    solved = order

    def order(rank, ranks, micro_batches):
        return solved(ranks - 1 - rank, ranks, micro_batches)
