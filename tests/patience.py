"""How long a test waits: a limit is for what hangs, not for a machine that is slow today."""

import math
import os

try:
    CORES = len(os.sched_getaffinity(0))
except AttributeError:  # macOS
    CORES = os.cpu_count() or 1

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
SPARE = "gw2"  # `make test`'s third: it has a core where the others leave one idle, see plugin.py
LOAD = max(1.0, os.getloadavg()[0] / CORES, WORKERS / CORES) * (4 if WORKER == SPARE else 1)


def patience(seconds: float) -> int:
    """Seconds of a quiet machine as seconds of this one, which others may be using as well.

    They grow with the processes that waited for each core when the tests began, with the number of
    processes that run tests, and for the one that has only what the others leave.
    """
    return math.ceil(seconds * LOAD)
