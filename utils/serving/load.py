"""A load generator: many clients at once, with the timings and errors of each request.

    load = run(lambda i: client.stream(prompts[i % 8]), clients=16, requests=64, count=count_tokens)
    load.requests                       # a frame, one row per request: start, first, end, tokens, …
    load.summary["tokens_per_second"], load.summary["latency_p95"]
    load.goodput(first=0.2, per_token=0.05)     # requests per second that kept this promise

`send(i)` sends request number i and returns an iterator of chunks as they arrive, or the whole
response.

*Closed loop*: each of `clients` threads sends its next request when the previous response is
complete. A slow server gets fewer requests, so the queue of a closed loop is never longer than the
number of clients. *Open loop* (`rate`): requests arrive at random times (Poisson), as from many
independent users; up to `clients` of them are in flight. A request's clock starts when it arrives,
not when a client is free to send it: otherwise the waits for a stalled server would not be counted
("coordinated omission").

Little's law: the mean number of requests in the system is their arrival rate times the mean time
that each spends in it, L = λ·W (Little, 1961). `summary` reports λ·W next to the time average of
the number in flight, which is sampled during the load.
"""

import bisect
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

GLANCE = 0.01  # seconds between two samples of the number in flight
AFTER = 60.0  # seconds that the last requests have to end if no limit is given
COLUMNS = ("client", "start", "sent", "first", "end", "tokens", "pieces", "error")


@dataclass(frozen=True)
class Load:
    """The results of a load.

    requests    one row per request: `start` (arrival), `sent`, `first` (chunk) and `end` in seconds
                since the load began; `tokens`; `pieces` (chunks); `error`: text, None on success.
                Events that did not happen are NaN.
    in_flight   frame of `seconds` and `count`: requests started but not ended
    seconds     from the start of the load to the end of its last request
    """

    requests: pd.DataFrame
    in_flight: pd.DataFrame
    seconds: float
    clients: int
    rate: float | None = None

    @property
    def errors(self) -> dict:
        """{error text: number of requests}, most frequent first."""
        return self.requests["error"].dropna().value_counts().to_dict()

    @cached_property
    def summary(self) -> dict:
        """Figures for the whole load, times in seconds. Latency and first token (`first_…`, the
        time until the first chunk) cover successful requests; throughput counts their tokens;
        `time_per_token` is the mean time between two tokens after the first.

        `in_flight` is the time average of the number in flight; `little` is λ·W over all requests,
        including failed ones.
        """
        rows, seconds = self.requests, max(self.seconds, 1e-9)
        good = rows[rows["error"].isna()]
        latency, first = good["end"] - good["start"], good["first"] - good["start"]
        more = good[good["tokens"] > 1]
        between = (more["end"] - more["first"]).sum() / max((more["tokens"] - 1).sum(), 1)
        ended = rows["end"].dropna()
        stay = ended - rows.loc[ended.index, "start"]
        counts, gaps = self.in_flight["count"], np.diff(self.in_flight["seconds"], append=seconds)
        found = {
            "clients": self.clients,
            "requests": len(rows),
            "errors": int(rows["error"].notna().sum()),
            "seconds": self.seconds,
            "tokens_per_second": good["tokens"].sum(min_count=1) / seconds,
            "requests_per_second": len(good) / seconds,
        }
        for name, values in (("latency", latency), ("first", first)):
            found[f"{name}_mean"] = values.mean()
            for percent in (50, 95, 99):
                found[f"{name}_p{percent}"] = values.quantile(percent / 100)
        found["time_per_token"] = between if len(more) else float("nan")
        found["in_flight"] = (counts * gaps).sum() / gaps.sum() if len(counts) else float("nan")
        found["little"] = len(stay) / seconds * stay.mean() if len(stay) else float("nan")
        return {name: v if isinstance(v, int) else float(v) for name, v in found.items()}

    def goodput(self, first: float = math.inf, per_token: float = math.inf) -> float:
        """Requests per second that succeeded with the first token within `first` seconds and on
        average at most `per_token` seconds per later token (as AIPerf's `--goodput` counts)."""
        rows = self.requests[self.requests["error"].isna()]
        between = (rows["end"] - rows["first"]) / (rows["tokens"] - 1)
        slow = (rows["tokens"] > 1) & (between > per_token)
        kept = (rows["first"] - rows["start"] <= first) & ~slow
        return int(kept.sum()) / max(self.seconds, 1e-9)

    def __str__(self):
        s = self.summary
        return (
            f"{s['requests']} requests by {self.clients} clients in {s['seconds']:.1f} s, "
            f"{s['errors']} failed: {s['tokens_per_second']:.0f} tokens/s, latency "
            f"{s['latency_p50'] * 1e3:.0f} ms (p50) {s['latency_p95'] * 1e3:.0f} ms (p95), "
            f"first token {s['first_p50'] * 1e3:.0f} ms (p50)"
        )


def tokens_of(piece: Any) -> float:
    """The number of tokens in a chunk: the length of a list or array, or of its `tokens` attribute
    (the engine's chunks); NaN for text, whose tokens are unknown."""
    piece = getattr(piece, "tokens", piece)
    return float("nan") if isinstance(piece, (str, bytes)) else float(np.size(piece))


def run(
    send: Callable,
    clients: int,
    requests: int | None = None,
    seconds: float | None = None,
    rate: float | None = None,
    seed: int = 0,
    *,
    count: Callable = tokens_of,
    limit: float | None = None,
) -> Load:
    """Send requests until `requests` were sent or `seconds` have passed, then wait for their end.

    send      send(i), i = 0, 1, 2, …: returns an iterator of chunks, or the whole response
    clients   threads; with `rate`: the most requests in flight at once
    rate      mean arrivals per second, drawn from `seed`; None: closed loop
    count     tokens of a chunk; called after the load, so that it slows down no request
    limit     seconds for the whole load; requests that have not ended by then get an error.
              Default: `seconds` (if given) plus a minute, else five minutes
    If `send` raises, the request's row holds the error. Raises ValueError for invalid arguments.
    """
    _check(clients, requests, seconds, rate, limit)
    if limit is None:
        limit = 5 * AFTER if seconds is None else seconds + AFTER
    course = _Course(send, requests, seconds, rate, seed, limit)
    threads = [
        threading.Thread(target=course.client, args=(number,), name=f"client {number}", daemon=True)
        for number in range(clients)
    ]
    course.begin()
    for thread in threads:
        thread.start()
    glances = course.watch(threads)
    rows, seconds = course.rows(count)
    glances = pd.DataFrame(glances, columns=["seconds", "count"])
    return Load(rows, glances[glances["seconds"] <= seconds], seconds, clients, rate)


def sweep(
    send: Callable, clients: Iterable[int] = (1, 2, 4, 8, 16), per_client: int = 4, **options: Any
) -> dict[int, Load]:
    """{clients: Load}: one closed loop per number of clients, with `per_client` requests each.

    `options` as for `run`; request numbers continue from one loop to the next."""
    loads, begun = {}, 0
    for many in clients:
        loads[many] = run(
            lambda i, b=begun: send(b + i), many, requests=per_client * many, **options
        )
        begun += per_client * many
    return loads


def table(loads: dict) -> pd.DataFrame:
    """The summaries of {name: Load} as a frame, one row each."""
    return pd.DataFrame({name: load.summary for name, load in loads.items()}).T


def arrivals(rate: float, seed: int = 0) -> Iterator[float]:
    """Endless arrival times, in seconds, of a Poisson process of `rate` arrivals per second."""
    draw, moment = random.Random(seed), 0.0
    while True:
        moment += draw.expovariate(rate)
        yield moment


def _check(clients, requests, seconds, rate, limit):
    if type(clients) is not int or not 1 <= clients <= 4096:
        raise ValueError(f"clients {clients!r} is not a number of clients: give 1 to 4096")
    if requests is None and seconds is None:
        raise ValueError("the load has no end: give requests or seconds")
    if requests is not None and (type(requests) is not int or requests < 1):
        raise ValueError(f"requests {requests!r} is not a positive integer")
    for name, value in (("seconds", seconds), ("rate", rate), ("limit", limit)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} {value!r} is not a positive number")


class _Course:
    """The state that the clients share. Each request is a row of the book; when the time is up, the
    book closes and ignores what late clients write."""

    def __init__(self, send, requests, seconds, rate, seed, limit):
        self.send, self.seconds, self.limit = send, seconds, limit
        self._numbers = itertools.count() if requests is None else iter(range(requests))
        self._due = arrivals(rate, seed) if rate else None
        self._dues = []  # open loop: arrival time of each request
        self._most = requests or float("inf")
        self._lock, self._book = threading.Lock(), {}
        self._ended, self._closed = 0, False

    # ---- the clock

    def begin(self):
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    # ---- what a client does

    def client(self, number):
        while (i := self._take(number)) is not None:
            pieces, error = [], None
            try:
                self._write(i, sent=self.now())
                self._receive(self.send(i), i, pieces)
            except BaseException as problem:  # also exit(): counted, and the client continues
                error = f"{type(problem).__name__}: {problem}"
            self._write(i, end=self.now(), error=error, got=pieces)

    def _take(self, number):
        """Wait for the next request to be due and return its number; None: no more requests."""
        with self._lock:
            now = self.now()
            late = self._due is None and self.seconds and now >= self.seconds
            i = None if self._closed or late else next(self._numbers, None)
            if i is None:
                return None
            if self._due is None:
                self._book[i] = {"client": number, "start": now}
                return i
            due = self._arrival(i)
        if self.seconds and due >= self.seconds:
            return None
        while (early := due - self.now()) > 0 and not self._closed:
            time.sleep(min(early, 0.1))
        with self._lock:
            if self._closed:
                return None
            self._book[i] = {"client": number, "start": due}
        return i

    def _arrival(self, i):
        while len(self._dues) <= i:
            self._dues.append(next(self._due))
        return self._dues[i]

    def _write(self, i, **values):
        with self._lock:
            if not self._closed:
                self._book[i].update(values)
                self._ended += "end" in values

    def _receive(self, answer, i, pieces):
        whole = isinstance(answer, (str, bytes, list, tuple, dict, np.ndarray))
        if whole or not hasattr(answer, "__iter__"):
            pieces.append(answer)
            self._write(i, first=self.now())
            return
        for piece in answer:
            if not pieces:
                self._write(i, first=self.now())
            pieces.append(piece)
            if self._closed:  # disconnect, as a client that leaves would
                leave = getattr(answer, "cancel", None) or getattr(answer, "close", lambda: None)
                leave()
                break

    # ---- what the caller does meanwhile and after

    def watch(self, threads):
        """Sample the number in flight until all clients are done or the time is up."""
        glances = []
        try:
            while any(thread.is_alive() for thread in threads) and self.now() < self.limit:
                glances.append((self.now(), self._arrived() - self._ended))
                time.sleep(GLANCE)
        finally:  # even when interrupted: the clients stop at their next chunk
            arrived = self._arrived()
            with self._lock:
                self._closed = True
        for i in range(arrived):  # open loop: requests for which no client was free in time
            self._book.setdefault(i, {"start": self._dues[i]} if self._due else {})
        return glances

    def _arrived(self):
        """Requests so far; in an open loop, including those that no client has taken yet."""
        with self._lock:
            if self._due is None:
                return len(self._book)
            now = min(self.now(), self.seconds or float("inf"))
            while len(self._dues) < self._most and (not self._dues or self._dues[-1] <= now):
                self._dues.append(next(self._due))
            return min(bisect.bisect_right(self._dues, now), self._most)

    def rows(self, count):
        """(frame of all requests, seconds until the last of them ended)."""
        for row in self._book.values():
            got = row.pop("got", [])
            row["pieces"] = len(got)
            row["tokens"] = float(sum(count(piece) for piece in got))
            if "end" not in row:
                what = "end" if "sent" in row else "free client"
                row["error"] = f"no {what} within the load's {self.limit:g} s"
        numbers = sorted(self._book)
        frame = pd.DataFrame([self._book[i] for i in numbers], numbers, list(COLUMNS))
        frame.index.name = "request"
        frame["error"] = frame["error"].astype(object).where(frame["error"].notna(), None)
        late = frame.empty or bool(frame["end"].isna().any())
        return frame, self.now() if late else float(frame["end"].max())
