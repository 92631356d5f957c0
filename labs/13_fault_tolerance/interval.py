"""Lab 13c and d: how often a run fails, and how often it should save.

    between = between_failures({"GPU": (419, 16_384 * 54 * 24)}, {"GPU": 1024})
    best_interval(save=60, between=between)

All times are in seconds, but those that a part has run. Failures come at random, `between` apart on
average, whatever the run is doing then: computing, saving or restarting. A failure undoes what was
computed since the last checkpoint that was saved to its end, and then the run restarts, which takes
`restart` (again from its beginning, where another failure strikes meanwhile).
"""

import math

import numpy as np


def between_failures(observed: dict[str, tuple[int, float]], parts: dict[str, int]) -> float:
    """Mean seconds between two failures of a run that any failure of any of its parts stops.

    observed  {kind of part: (failures seen, hours that all parts of this kind ran, together)}
    parts     {kind of part: how many of them the run needs}; each kind was observed
    A kind that has not failed is taken not to fail; a run whose parts do not fail: math.inf.
    """
    raise NotImplementedError("failures a second of all parts together; one over that")


def lost_share(interval: float, save: float, restart: float, between: float) -> float:
    """The share, 0 to 1, of a long run's expected time that is not computing which is kept, where
    it computes for `interval` between two checkpoints and stands still for `save` at each."""
    raise NotImplementedError(
        "the expected time of one interval with its checkpoint, failures included"
    )


def best_interval(save: float, between: float) -> float:
    """The interval for which a long run is expected to end first, or one with which it takes at
    most 0.2 % longer. `save` may be as long as `between`, and longer."""
    raise NotImplementedError(
        "the interval with the smallest lost_share, by a formula or by trying"
    )


def best_plan(
    memory: float, disk: float, restart: float, between: float, light: float
) -> tuple[float, int]:
    """Two kinds of checkpoints: (interval, every). The run computes for `interval` and saves, again
    and again; every `every`-th checkpoint goes to the disk and takes `disk`, the others go to a
    neighbour's memory and take `memory`.

    A failure is a *light* one with probability `light`: the neighbour's memory is still there, and
    the run goes on from the last checkpoint of either kind. All others, in a restart too, take it
    back to the last one on the disk. (After a light failure in a restart it goes where it was going
    to.) The plan is the best one, or takes at most 1 % longer; `every` is 1 to 64.
    """
    raise NotImplementedError(
        "the expected time of all between two checkpoints on the disk, state by state"
    )
