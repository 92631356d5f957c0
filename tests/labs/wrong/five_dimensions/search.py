"""Lab 10, search: each body, written after the solution, is a wrong answer."""


def answer_of_the_exercise():
    """Returns what was right for another machine.

    hint: there are 64 GPUs: all of them must work
    """

    def best_strategy(model, machine, gpus, global_batch):
        return Strategy(32, 8, 4, 1, 6, 1, 1536, "selective", 1, True)


def first_that_fits():
    """Takes the first that fits.

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

    hint: does not fit
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

    hint: this is of type NoneType
    """

    def best_strategy(model, machine, gpus, global_batch):
        Strategy(dp=gpus)


def powers_of_two():
    """35 and 7 are sizes of pipelines too.

    hint: 530 billion on 560 A100
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
