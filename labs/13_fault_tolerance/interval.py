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
    raise NotImplementedError("failures per second of all parts together; one over that")


def lost_share(interval: float, save: float, restart: float, between: float) -> float:
    """The share, 0 to 1, of a long run's expected time that is not lasting computation, if it
    computes for `interval` between two checkpoints and pauses for `save` at each."""
    raise NotImplementedError(
        "the expected time of one interval with its checkpoint, failures included"
    )


def best_interval(save: float, between: float) -> float:
    """The interval with the shortest expected time of a long run, or one with which it takes at
    most 0.2 % longer. `save` may be as long as `between`, or longer."""
    raise NotImplementedError(
        "the interval with the smallest lost_share, by a formula or by trying"
    )


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
    raise NotImplementedError("the expected time between two checkpoints on disk, state by state")
