"""A class that opens its seats at the same moment: time until the last is ready, and memory.

    python -m tests.bench.bench_hub --seats 40 --ranks 4

The hub is that of the tests (as root, with limits on seats); each seat is a JupyterLab on its own
copy of the course. All learners log in at once; some then start the four ranks of lesson 01. Memory
is PSS, as in bench_seat. It needs Linux and bubblewrap.
"""

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.bench.bench_seat import GIB, MIB, Look, look
from tests.hub.hubs import RunningHub
from tests.hub.visitor import Visitor

LIMIT = 900  # seconds that a learner waits for a seat, or for a cell
RANKS = """
from utils.ranks import Ranks
ranks = Ranks(4)
print(len(ranks.run(lambda: 1)))
"""


def sit(learner: Visitor) -> float:
    """Log in and wait until JupyterLab answers; return the seconds this took."""
    begin = time.monotonic()
    learner.log_in()
    while not learner.server()["ready"]:
        time.sleep(1)  # a browser is notified by the hub and polls less often
        assert time.monotonic() - begin < LIMIT, learner.name
    return time.monotonic() - begin


def seats(hub: RunningHub) -> list[Look]:
    """The memory and CPU time of each seat."""
    children = psutil.Process(hub.process.pid).children()
    return [look(child.pid, True) for child in children if child.name() == "bwrap"]


def main() -> None:
    parser = argparse.ArgumentParser(description="A class that opens its seats at once.")
    parser.add_argument("--seats", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=4, help="learners that start four ranks")
    options = parser.parse_args()
    with (
        RunningHub("--seats", str(options.seats)) as hub,
        ThreadPoolExecutor(options.seats) as pool,
    ):
        learners = [Visitor(hub.address, f"learner-{i + 1}") for i in range(options.seats)]
        waited = sorted(pool.map(sit, learners))
        print(
            f"{options.seats} seats on {psutil.cpu_count()} cores: the first is ready after "
            f"{waited[0]:.0f} s, half after {statistics.median(waited):.0f}, the last after "
            f"{waited[-1]:.0f}"
        )
        assert "Active user limit exceeded" in Visitor(hub.address, "one-more").ask_in().text
        idle = seats(hub)
        memory = sum(seat.pss for seat in idle)
        print(
            f"idle: {memory / GIB:.2f} GiB, {memory / MIB / len(idle):.0f} MiB each; a start takes "
            f"{statistics.mean(seat.cpu for seat in idle):.1f} core-seconds"
        )
        begin = time.monotonic()
        busy = learners[: options.ranks]
        said = list(pool.map(lambda learner: learner.run(RANKS, LIMIT), busy))
        assert said == ["4\n"] * len(busy), said
        grown = (sum(seat.pss for seat in seats(hub)) - memory) / MIB / len(busy)
        print(
            f"{len(busy)} of them start four ranks in {time.monotonic() - begin:.0f} s, "
            f"{grown:.0f} MiB more each"
        )


if __name__ == "__main__":
    main()
