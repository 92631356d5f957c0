"""The counters and histograms of an engine, for its metrics.

stats.submitted(request);  stats.stepped(step, served, seconds);  stats.finished(request)
stats.read(scheduler, streams)                  # a dictionary of numbers
stats.histograms["time_to_first_token"]
"""

import bisect
import math
import time
from collections import deque

from utils.serving.engine.scheduler import Request, Scheduler, Step

WINDOW = 5.0  # seconds over which "tokens per second" is averaged
BOUNDS = (  # of a histogram, in seconds
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
    math.inf,
)
HISTOGRAMS = (
    "request_queue_time", "time_to_first_token", "inter_token_latency", "e2e_request_latency",
)


class Histogram:
    """A cumulative histogram of durations, as in Prometheus: `counts` of those of at most each of
    BOUNDS seconds, their `sum` in seconds, and their number, `count`."""

    def __init__(self):
        self.counts, self.sum, self.count = [0] * len(BOUNDS), 0.0, 0

    def observe(self, seconds: float) -> None:
        self.sum, self.count = self.sum + seconds, self.count + 1
        for place in range(bisect.bisect_left(BOUNDS, seconds), len(BOUNDS)):
            self.counts[place] += 1


class Stats:
    """The engine's counters since the start, and its rates over the last seconds.

    histograms   of requests, by vLLM's names: request_queue_time (until a slot is free),
                 time_to_first_token and e2e_request_latency (both since arrival), and
                 inter_token_latency (from one token to the next)
    """

    def __init__(self):
        self.tokens = self.prompt_tokens = self.prefix_cache_hits = 0
        self.requests = self.steps = self.restarts = 0
        self.histograms = {name: Histogram() for name in HISTOGRAMS}
        self.failed = self.cancelled = self.rejected = 0
        self._first_last = 0.0
        self._recent = deque()  # (when, tokens, seconds) of the steps in the window

    def submitted(self, request: Request) -> None:
        """Record an accepted request."""
        self.requests += 1
        request.came = time.monotonic()

    def stepped(self, step: Step, served: list[tuple[Request, int]], seconds: float) -> None:
        """Record a step that produced these (request, token)."""
        now, took = time.monotonic(), self.histograms
        self.steps += 1
        self.tokens += len(served)
        for chunk in step.chunks:
            if chunk.again:
                continue
            self.prompt_tokens += chunk.stop - chunk.start
            if chunk.first:
                self.prompt_tokens += chunk.request.shared
                self.prefix_cache_hits += chunk.request.shared
                took["request_queue_time"].observe(now - seconds - chunk.request.came)
        for request, _ in served:
            if len(request.new) == 1:
                self._first_last = now - request.came
                took["time_to_first_token"].observe(self._first_last)
            else:
                took["inter_token_latency"].observe(now - request.heard)
            request.heard = now
        self._recent.append((now, len(served), seconds))
        self._forget(now)

    def finished(self, request: Request) -> None:
        """Record a request that ended normally."""
        self.histograms["e2e_request_latency"].observe(time.monotonic() - request.came)

    def _forget(self, now):
        while self._recent and self._recent[0][0] < now - WINDOW:
            self._recent.popleft()

    def read(self, scheduler: Scheduler, streams: int) -> dict:
        """Numbers by name; times in seconds, `kv_` in blocks.

        streams: requests whose answer is incomplete, including those that wait. A request whose
        slot is already free still counts as running until its last token is handed out.
        """
        now = time.monotonic()
        self._forget(now)
        first = self.histograms["time_to_first_token"]
        waiting, slots = len(scheduler.waiting), scheduler.max_num_seqs
        running = min(slots, streams - waiting)
        since = now - self._recent[0][0] + self._recent[0][2] if self._recent else 1.0
        return {
            "running": running,
            "waiting": waiting,
            "slots": slots,
            "queue": scheduler.queue,
            "occupancy": running / slots,
            "kv_used": scheduler.blocks.used,
            "kv_size": scheduler.blocks.size,
            "preemptions_total": scheduler.preemptions,
            "tokens_total": self.tokens,
            "prompt_tokens_total": self.prompt_tokens,
            "prefix_cache_hits_total": self.prefix_cache_hits,
            "requests_total": self.requests,
            "requests_failed": self.failed,
            "requests_cancelled": self.cancelled,
            "requests_rejected": self.rejected,
            "restarts": self.restarts,
            "steps_total": self.steps,
            "tokens_per_second": sum(tokens for _, tokens, _ in self._recent) / since,
            "step_seconds": sum(s for _, _, s in self._recent) / max(1, len(self._recent)),
            "time_to_first_token_last": self._first_last,
            "time_to_first_token": first.sum / max(1, first.count),
        }
