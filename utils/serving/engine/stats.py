"""What the engine counts: requests, tokens, and how fast they come.

stats.submitted(request); stats.stepped(step, served, seconds)
stats.read(scheduler, positions)            # a dictionary of numbers
"""

import time
from collections import deque

WINDOW = 5.0  # seconds that "tokens per second" looks back


class Stats:
    """Counters since the start, and what can be said of the last moments."""

    def __init__(self):
        self.tokens = self.requests = self.steps = self.restarts = 0
        self.failed = self.cancelled = self.rejected = 0
        self._first_total, self._first_count, self._first_last = 0.0, 0, 0.0
        self._recent = deque()  # (when, tokens, seconds) of the steps in the window

    def submitted(self, request):
        """A request was taken."""
        self.requests += 1
        request.came = time.monotonic()

    def stepped(self, step, served, seconds):
        """A step has given these (request, token)."""
        now = time.monotonic()
        self.steps += 1
        self.tokens += len(served)
        for request, _ in served:
            if len(request.new) == 1:
                self._first_last = now - request.came
                self._first_total += self._first_last
                self._first_count += 1
        self._recent.append((now, len(served), seconds))
        self._forget(now)

    def _forget(self, now):
        while self._recent and self._recent[0][0] < now - WINDOW:
            self._recent.popleft()

    def read(self, scheduler, positions):
        """Numbers by name; times in seconds, `kv_` in positions."""
        now = time.monotonic()
        self._forget(now)
        running, slots = scheduler.running, len(scheduler.slots)
        since = now - self._recent[0][0] + self._recent[0][2] if self._recent else 1.0
        return {
            "running": len(running),
            "waiting": len(scheduler.waiting),
            "slots": slots,
            "queue": scheduler.queue,
            "occupancy": len(running) / slots,
            "kv_used": sum(request.cached for request in running),
            "kv_size": slots * positions,
            "tokens_total": self.tokens,
            "requests_total": self.requests,
            "requests_failed": self.failed,
            "requests_cancelled": self.cancelled,
            "requests_rejected": self.rejected,
            "restarts": self.restarts,
            "steps_total": self.steps,
            "tokens_per_second": sum(tokens for _, tokens, _ in self._recent) / since,
            "step_seconds": sum(s for _, _, s in self._recent) / max(1, len(self._recent)),
            "time_to_first_token_last": self._first_last,
            "time_to_first_token": self._first_total / max(1, self._first_count),
        }
