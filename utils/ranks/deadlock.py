"""Whether processes wait for one another: a condition, where a time limit would have to guess.

A deadlock is known after seconds, on a busy machine as on an idle one: what could still happen
there is not asleep, it waits for a core.
"""

import os
from collections.abc import Iterable

LOOK = 0.2  # seconds between two looks
LOOKS = 8  # in a row at which nothing has happened: a deadlock, if all are in collectives
SURE = 24  # the same, wherever they are: somebody may sleep for a moment
NETWORK = "gloo_tcp_loop"  # gloo's thread that sends and receives: it wakes 100 times a second


class Deadlock:
    """Looks at processes, every LOOK seconds. Without /proc (macOS) it never finds anything."""

    def __init__(self):
        self._before, self._alike = {}, 0

    def look(self, pids: Iterable[int]) -> int:
        """At so many looks in a row all threads slept, and since the one before it none had run
        but the network's, which has found nothing."""
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
        """They were asked for their stacks since: the next look compares nothing."""
        self._before = None


def _turns(pid: int) -> tuple[dict[str, int], int] | None:
    """({thread: how often it has had a core}, the network's sum of it); None while one of the
    threads wants a core, or the process ends."""
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
    except (OSError, KeyError, ValueError):  # it ends, or there is no /proc
        return None
