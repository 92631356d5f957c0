"""Lab 10, search: each body, written after the solution, is a wrong answer."""


def answer_of_the_exercise():
    """Returns what was right for another machine.

    kind: constants
    hint: all of them must work
    """

    def best_strategy(model, machine, gpus, global_batch):
        return Strategy(32, 8, 4, 1, 6, 1, 1536, "selective", 1, True)


def first_that_fits():
    """Takes the first that fits.

    kind: values
    hint: fits, but reaches only
    """

    def best_strategy(model, machine, gpus, global_batch):
        divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
        tried = [
            Strategy(gpus // (tp * pp), pp, tp, 1, 1, 1, global_batch, mode, zero, sp)
            for tp in divisors
            for pp in divisors
            if gpus % (tp * pp) == 0
            for mode in ("none", "selective", "full")
            for zero in (0, 1, 3)
            for sp in (False, True)
        ]
        found = outcomes(model, machine, tried)
        good = [i for i, one in enumerate(found) if one is not None and one.fits]
        return tried[good[0]]


def least_memory():
    """Takes what fits best, not what is fastest.

    kind: values
    hint: fits, but reaches only
    """

    def best_strategy(model, machine, gpus, global_batch):
        divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
        tried = [
            Strategy(gpus // (tp * pp), pp, tp, 1, 1, 1, global_batch, mode, zero, sp)
            for tp in divisors
            for pp in divisors
            if gpus % (tp * pp) == 0
            for mode in ("none", "selective", "full")
            for zero in (0, 1, 3)
            for sp in (False, True)
        ]
        found = outcomes(model, machine, tried)
        good = [i for i, one in enumerate(found) if one is not None and one.fits]
        return tried[min(good, key=lambda i: found[i].bytes)]


def memory_ignored():
    """Takes the fastest, whether it fits or not.

    kind: memory
    hint: does not fit | fits, but reaches only
    """

    def best_strategy(model, machine, gpus, global_batch):
        divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
        tried = [
            Strategy(gpus // (tp * pp), pp, tp, 1, 1, 1, global_batch, mode, zero, sp)
            for tp in divisors
            for pp in divisors
            if gpus % (tp * pp) == 0
            for mode in ("none", "selective", "full")
            for zero in (0, 1, 3)
            for sp in (False, True)
        ]
        found = outcomes(model, machine, tried)
        good = [i for i, one in enumerate(found) if one is not None]
        return tried[min(good, key=lambda i: found[i].seconds)]


def no_answer():
    """Makes a strategy and forgets to return it.

    kind: types
    hint: a Strategy is asked for
    """

    def best_strategy(model, machine, gpus, global_batch):
        Strategy(dp=gpus)


def powers_of_two():
    """35 and 7 are sizes of pipelines too.

    kind: sizes
    hint: fits, but reaches only | does not fit
    """

    def best_strategy(model, machine, gpus, global_batch):
        divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
        tried = [
            Strategy(gpus // (tp * pp), pp, tp, 1, 1, 1, global_batch, mode, zero, sp)
            for tp in divisors
            for pp in (1, 2, 4, 8, 16)
            if gpus % (tp * pp) == 0
            for mode in ("none", "selective", "full")
            for zero in (0, 1, 3)
            for sp in (False, True)
        ]
        found = outcomes(model, machine, tried)
        good = [i for i, one in enumerate(found) if one is not None and one.fits]
        return tried[min(good, key=lambda i: found[i].seconds)]


def slowest():
    """Sorts the wrong way.

    kind: values
    hint: fits, but reaches only
    """

    def best_strategy(model, machine, gpus, global_batch):
        divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
        tried = [
            Strategy(gpus // (tp * pp), pp, tp, 1, 1, 1, global_batch, mode, zero, sp)
            for tp in divisors
            for pp in divisors
            if gpus % (tp * pp) == 0
            for mode in ("none", "selective", "full")
            for zero in (0, 1, 3)
            for sp in (False, True)
        ]
        found = outcomes(model, machine, tried)
        good = [i for i, one in enumerate(found) if one is not None and one.fits]
        return tried[max(good, key=lambda i: found[i].seconds)]


def asks_the_planner():
    """Calls the course's search by a name put together.

    kind: library
    hint: utils/planner/search.py runs
    """

    import importlib

    def best_strategy(model, machine, gpus, global_batch):
        found = importlib.import_module("utils.planner." + "".join(("sea", "rch")))
        return found.search(model, machine, gpus, global_batch, top=1)[0].strategy


def known_by_name():
    """Remembers what it found for machines and models of these names.

    kind: constants
    hint: does not fit
    """

    right_strategy, known = best_strategy, {}

    def best_strategy(model, machine, gpus, global_batch):
        key = model.name, machine.name, gpus, global_batch
        if key not in known:
            known[key] = right_strategy(model, machine, gpus, global_batch)
        return known[key]


def one_micro_batch():
    """Tries micro-batches of one only.

    kind: part
    hint: fits, but reaches only
    """

    right_outcomes = outcomes

    def outcomes(model, machine, strategies):
        found = right_outcomes(model, machine, strategies)
        return [o if s.micro_batch == 1 else None for o, s in zip(found, strategies)]


def no_chunks():
    """Does not interleave.

    kind: part
    hint: fits, but reaches only
    """

    right_outcomes = outcomes

    def outcomes(model, machine, strategies):
        found = right_outcomes(model, machine, strategies)
        return [o if s.interleave == 1 else None for o, s in zip(found, strategies)]


def always_recomputes():
    """Recomputes the core of the attention, whether there is room or not.

    kind: constants
    hint: fits, but reaches only | empty
    """

    right_outcomes = outcomes

    def outcomes(model, machine, strategies):
        found = right_outcomes(model, machine, strategies)
        return [o if s.recompute == "selective" else None for o, s in zip(found, strategies)]


def more_than_one_device():
    """Splits at least once.

    kind: odd
    hint: in find_best.py line | all of them must work
    """

    right_outcomes = outcomes

    def outcomes(model, machine, strategies):
        found = right_outcomes(model, machine, strategies)
        return [o if s.gpus > 1 else None for o, s in zip(found, strategies)]


def takes_the_whole_memory():
    """Lets the machine have as much memory as it likes.

    kind: inputs
    hint: does not fit | is not what it was
    """

    right_strategy = best_strategy

    def best_strategy(model, machine, gpus, global_batch):
        object.__setattr__(machine, "memory", 2 * machine.memory)
        return right_strategy(model, machine, gpus, global_batch)


def batch_written_down():
    """Leaves what it needs in the model.

    kind: inputs
    hint: is not what it was before the call
    """

    right_strategy = best_strategy

    def best_strategy(model, machine, gpus, global_batch):
        object.__setattr__(model, "batch", global_batch)
        return right_strategy(model, machine, gpus, global_batch)


def a_few_at_random():
    """Tries a few strategies and is content.

    kind: luck
    hint: fits, but reaches only | in find_best.py line
    """

    import random

    right_outcomes = outcomes

    def outcomes(model, machine, strategies):
        few = set(random.sample(range(len(strategies)), min(len(strategies), 20)))
        found = right_outcomes(model, machine, strategies)
        return [o if i in few else None for i, o in enumerate(found)]


def leaves():
    """Leaves the program when it has found one.

    kind: end
    hint: leaves the program
    """

    right_strategy = best_strategy

    def best_strategy(*given):
        right_strategy(*given)
        quit()
