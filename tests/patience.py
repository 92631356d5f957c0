"""How long a test waits: a limit is for what hangs, not for a machine that is slow today."""

import math
import os

try:
    LOAD = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
except (AttributeError, OSError):  # macOS has no affinity
    LOAD = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def patience(seconds: float) -> int:
    """Seconds of a quiet machine as seconds of this one, which others may be using as well.

    They grow with the processes that waited for each core when the tests began.
    """
    return math.ceil(seconds * LOAD)
