"""Detects processes that wait for one another, by a condition instead of a guessed time limit.

A deadlock is found after seconds, on a busy machine as on an idle one: a thread that can still make
progress is not asleep but waits for a core.
"""

import os
from collections.abc import Iterable

LOOK = 0.2  # seconds between two looks
LOOKS = 8  # in a row without any progress: a deadlock, if all are in collectives
SURE = 24  # the same, wherever they are: a process may sleep for a moment
NETWORK = "gloo_tcp_loop"  # gloo's network thread, which wakes 100 times per second


class Deadlock:
    """Looks at processes, every LOOK seconds. Without /proc (macOS) it never finds anything."""

    def __init__(self):
        self._before, self._alike = {}, 0

    def look(self, pids: Iterable[int]) -> int:
        """The number of looks in a row at which all threads slept and, since the previous look,
        none had run except the network's, which found nothing."""
        now = {pid: _turns(pid) for pid in pids}
        if self._before is None:
            self._before = now
            return 0
        alike = now.keys() == self._before.keys() and all(
            new and old and new[0] == old[0] and (new[1] > old[1] or not new[1])
            for new, old in ((now[pid], self._before[pid]) for pid in now)
        )
        self._before, self._alike = now, self._alike + 1 if alike else 0
        return self._alike

    def disturbed(self) -> None:
        """Skip the comparison at the next look, after the processes were asked for their stacks."""
        self._before = None


def _turns(pid: int) -> tuple[dict[str, int], int] | None:
    """({thread: number of context switches}, those of the network thread); None while a thread is
    running or ready to run, or the process is ending."""
    threads, network = {}, 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/status") as file:
                status = dict(line.split(":", 1) for line in file)
            names = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            turns = sum(int(status[name]) for name in names)
            if status["Name"].strip() == NETWORK:
                network += turns
            elif status["State"].split()[0] != "S":
                return None
            else:
                threads[thread] = turns
        return threads, network
    except (OSError, KeyError, ValueError):  # the process is ending, or there is no /proc
        return None
