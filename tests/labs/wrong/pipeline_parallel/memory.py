"""Lab 08, memory: each body, written after the solution, is a wrong answer."""


def all_forward_first():
    """GPipe: all forward passes, then all backward passes.

    kind: memory
    hint: would do
    """

    def order(rank, ranks, micro_batches):
        return gpipe(rank, ranks, micro_batches)


def backward_first():
    """In turns, but the backward pass before its own forward pass on the last rank.

    kind: step
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

    kind: part
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

    kind: values
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

    kind: work
    hint: too few F's ahead
    """

    def order(rank, ranks, micro_batches):
        return [(kind, number) for number in range(micro_batches) for kind in "FB"]


def same_for_all():
    """Every rank goes as far ahead as the first one.

    kind: memory
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

    kind: sizes
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

    kind: end
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


def library():
    """The course's own.

    kind: library
    hint: that is the library
    """

    def order(rank, ranks, micro_batches):
        from utils.parallel.schedules import schedule

        return schedule("1f1b", ranks, micro_batches)[rank]


def library_by_another_name():
    """The course's own, its name put together.

    kind: library
    hint: that is the library
    """

    def order(rank, ranks, micro_batches):
        import importlib

        library = importlib.import_module("ut" + "ils.parallel.sched" + "ules")
        return [tuple(a[:2]) for a in library.schedule("1f1b", ranks, micro_batches)[rank]]


def up_to_nine_micro_batches():
    """Right for up to 9 micro-batches and 8 ranks.

    kind: sizes
    hint: would do
    """

    solved = order

    def order(rank, ranks, micro_batches):
        if micro_batches > 9 or ranks > 8:
            return gpipe(rank, ranks, micro_batches)
        return solved(rank, ranks, micro_batches)


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


def by_the_history():
    """Every call shifts what comes first.

    kind: step
    hint: in another | a second time
    """

    solved, calls = order, []

    def order(rank, ranks, micro_batches):
        calls.append(rank)
        if len(calls) % 2 and ranks == 1:
            return gpipe(rank, ranks, micro_batches)
        return solved(rank, ranks, micro_batches)


def by_chance():
    """Throws a die for how far it goes ahead.

    kind: luck
    hint: in another | a second time
    """

    def order(rank, ranks, micro_batches):
        import random

        ahead = min(random.randrange(ranks - rank), micro_batches)
        actions = [("F", number) for number in range(ahead)]
        for number in range(micro_batches):
            if ahead + number < micro_batches:
                actions.append(("F", ahead + number))
            actions.append(("B", number))
        return actions


def numbers_as_text():
    """Actions in one word.

    kind: types
    hint: is not a list of (kind, number) | , not a list of (kind, number)
    """

    solved = order

    def order(rank, ranks, micro_batches):
        return [f"{kind}{number}" for kind, number in solved(rank, ranks, micro_batches)]


def one_micro_batch():
    """Has no list where there is only one micro-batch.

    kind: odd
    hint: never does
    """

    solved = order

    def order(rank, ranks, micro_batches):
        return solved(rank, ranks, micro_batches) if micro_batches > 1 else []


def one_less_ahead():
    """The ranks in the middle go one forward pass less ahead.

    kind: work
    hint: too few F's ahead
    """

    def order(rank, ranks, micro_batches):
        ahead = min(ranks - 1 - rank, micro_batches)
        ahead -= 0 < rank < ranks - 1 and ahead > 0
        actions = [("F", number) for number in range(ahead)]
        for number in range(micro_batches):
            if ahead + number < micro_batches:
                actions.append(("F", ahead + number))
            actions.append(("B", number))
        return actions
