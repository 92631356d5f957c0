"""How long a test waits: a limit should catch hangs, not a slow machine."""

import math
import os

try:
    CORES = len(os.sched_getaffinity(0))
except AttributeError:  # macOS
    CORES = os.cpu_count() or 1

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
SPARE = "gw2"  # `make test`'s third, which uses the idle time of the cores, see plugin.py
LOAD = max(1.0, os.getloadavg()[0] / CORES, WORKERS / CORES) * (4 if WORKER == SPARE else 1)


def patience(seconds: float) -> int:
    """Convert seconds on a quiet machine to seconds on this one, which may be busy.

    They grow with the load per core when the tests began and with the number of test processes, and
    are longest in the spare process.
    """
    return math.ceil(seconds * LOAD)
