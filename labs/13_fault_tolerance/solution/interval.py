"""Lab 13c and d: how often a run fails, and how often it should save.

    between = between_failures({"GPU": (419, 16_384 * 54 * 24)}, {"GPU": 1024})
    best_interval(save=60, between=between)

All times are in seconds, except the hours that parts ran. Failures come at random, `between` apart
on average, whatever the run is doing: computing, saving or restarting. A failure undoes everything
computed since the last complete checkpoint, and then the run restarts, which takes `restart` (and
starts over if another failure strikes meanwhile).
"""

import math

import numpy as np


def between_failures(observed: dict[str, tuple[int, float]], parts: dict[str, int]) -> float:
    """Mean seconds between two failures of a run that is stopped by any failure of any part.

    observed  {kind of part: (failures seen, hours that all parts of this kind ran in total)}
    parts     {kind of part: number that the run needs}; each kind was observed
    A kind that has not failed is assumed never to fail; if no part fails, return math.inf.
    """
    ### BEGIN SOLUTION: failures per second of all parts together; one over that
    rate = 0.0
    for kind, count in parts.items():
        failures, hours = observed[kind]
        rate += count * failures / (3600 * hours)
    return 1 / rate if rate else math.inf
    ### END SOLUTION


def lost_share(interval: float, save: float, restart: float, between: float) -> float:
    """The share, 0 to 1, of a long run's expected time that is not lasting computation, if it
    computes for `interval` between two checkpoints and pauses for `save` at each."""
    ### BEGIN SOLUTION: the expected time of one interval with its checkpoint, failures included
    expected = between * math.exp(restart / between) * math.expm1((interval + save) / between)
    return 1 - interval / expected
    ### END SOLUTION


def best_interval(save: float, between: float) -> float:
    """The interval with the shortest expected time of a long run, or one with which it takes at
    most 0.2 % longer. `save` may be as long as `between`, or longer."""
    ### BEGIN SOLUTION: the interval with the smallest lost_share, by a formula or by trying
    shortest, longest = 1e-4 * math.sqrt(save * between), 10 * math.sqrt(save * between)
    for _ in range(60):  # the share falls and then rises: keep the two thirds with the lowest point
        third = (longest - shortest) / 3
        left, right = shortest + third, longest - third
        if _seconds(left, save, between) < _seconds(right, save, between):
            longest = right
        else:
            shortest = left
    return (shortest + longest) / 2


def _seconds(interval, save, between):
    """Logarithm of the expected seconds per second of computing, which may be huge."""
    x = (interval + save) / between
    return math.log(between / interval) + x + math.log(-math.expm1(-x))
    ### END SOLUTION


def best_plan(
    memory: float, disk: float, restart: float, between: float, light: float
) -> tuple[float, int]:
    """The plan (interval, every) for two kinds of checkpoints. The run repeatedly computes for
    `interval` and saves; every `every`-th checkpoint goes to disk and takes `disk`, the others go
    to a neighbour's memory and take `memory`.

    A failure is *light* with probability `light`: the neighbour's memory survives, and the run
    continues from the last checkpoint of either kind. All others, during a restart too, take it
    back to the last one on disk. (After a light failure during a restart, it restarts from the same
    checkpoint.) The plan is the best one, or takes at most 1 % longer; `every` is 1 to 64.
    """
    ### BEGIN SOLUTION: the expected time between two checkpoints on disk, state by state
    plans = []
    for every in range(1, 65):
        interval = best_interval((memory * (every - 1) + disk) / every, between)
        for factor in np.geomspace(0.25, 8, 24):
            plan = (factor * interval, every)
            plans.append((_stretch(*plan, memory, disk, restart, between, light), *plan))
    return min(plans)[1:]


def _stretch(interval, every, memory, disk, restart, between, light):
    """Expected time divided by computing time. With `running[i]` the time from the i-th interval to
    the checkpoint on disk, and `back[i]` that from the beginning of a restart there,

        running[i] = t + whole · running[i + 1] + (1 − whole) · (light · back[i] + heavy · back[0])
        back[i]    = u + up · running[i] + (1 − up) · (light · back[i] + heavy · back[0])

    each of the form a + b · back[0]; t and u are the expected times until a failure or the end.
    """
    up, heavy = math.exp(-restart / between), 1 - light
    u, stays = between * (1 - up), 1 - (1 - up) * light
    a = b = 0.0
    for number in reversed(range(every)):
        whole = math.exp(-(interval + (disk if number == every - 1 else memory)) / between)
        t, fails = between * (1 - whole), 1 - whole
        # back[i] = (u + up · running[i] + (1 − up) · heavy · back[0]) / stays, substituted above
        rest = 1 - fails * light * up / stays
        a = (t + whole * a + fails * light * u / stays) / rest
        b = (whole * b + fails * heavy + fails * light * (1 - up) * heavy / stays) / rest
    c = stays - (1 - up) * heavy - up * b  # back[0] · stays = u + up · (a + b · back[0]) + …
    first = (u + up * a) / c if c > 1e-12 else math.inf
    return (a + b * first) / (every * interval)
    ### END SOLUTION
