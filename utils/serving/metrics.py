"""A server's metrics, including ours, and its statistics, as frames.

    metrics(server)                     # every sample of /metrics: name, labels, value
    scrape(server)                      # ours now: {"tokens_total": 512.0, "batch_occupancy": …}
    statistics(server)                  # a row for each model and version: requests, mean times

    with Watch(server, every=0.1) as watch:      # a thread samples while the block runs
        run_a_load()
    watch.frame["kv_use"]               # a row per sample; its column `seconds` begins at 0
    watch.rate("tokens_total")          # tokens/s between two samples

Metrics are in Prometheus's text format, on a port of their own; a counter's name ends in `_total`.
`server` is a TritonServer or, for metrics, the "host:port" of any server's metrics.
"""

import http.client
import threading
import time
import urllib.request
from urllib.parse import quote

import pandas as pd
from prometheus_client.parser import text_string_to_metric_families

from utils.serving.install import ServerError
from utils.serving.server.triton_server import TritonServer

OURS = "kintsugi_"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # bypasses any proxy
LOST = (OSError, http.client.HTTPException)  # errors of a sample that gets no answer
TIMES = ("queue", "compute_input", "compute_infer", "compute_output")  # of Triton's statistics


def metrics(server: TritonServer | str, timeout: float = 5.0) -> pd.DataFrame:
    """Every sample of /metrics: columns `name`, one for each label, and `value`.

    Raises OSError or http.client.HTTPException when the server does not answer.
    """
    address = getattr(server, "metrics", server)
    with DIRECT.open(f"http://{address}/metrics", timeout=timeout) as answer:
        lines = answer.read().decode().splitlines()
    # Without the TYPE lines, which would make the parser append _total to a counter's name.
    text = "\n".join(line for line in lines if not line.startswith("#"))
    rows = [
        {"name": sample.name, **sample.labels, "value": sample.value}
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    frame = pd.DataFrame(rows, columns=list(dict.fromkeys(key for row in rows for key in row)))
    return frame[[*frame.columns.drop("value", errors="ignore"), "value"]] if rows else frame


def scrape(server: TritonServer | str, prefix: str = OURS, by: str | None = None) -> pd.Series:
    """The current metrics whose names begin with `prefix`: {name without it: value}.

    Samples that differ only in labels are summed; a histogram gives its sum and count.
    by: a label, such as "model", that keeps them apart: {"request_success gpt": …}.
    """
    frame = metrics(server)
    if frame.empty or not (chosen := frame["name"].str.startswith(prefix)).any():
        return pd.Series(dtype=float)
    frame = frame[chosen & ~frame["name"].str.endswith("_bucket")]
    names = frame["name"].str.removeprefix(prefix)
    if by is not None:
        names = (names + " " + frame[by].fillna("")).str.strip()
    return frame["value"].groupby(names.rename(None)).sum()


def statistics(server: TritonServer, model: str | None = None) -> pd.DataFrame:
    """Triton's statistics since loading, one row per model and version.

    Successful `requests`, `failed`, `executions`, and mean seconds per request: `request`, from
    receipt to answer, and of that `queue` and the three phases of the computation.

    Of a decoupled model Triton sees only the call: every request counts as a success that ended
    when `execute` returned. Outcomes and durations of its answers are in our own metrics.
    """
    path = f"models/{quote(model)}/stats" if model else "models/stats"
    try:
        found = server.ask("GET", path, seconds=5.0).json()["model_stats"]
    except ServerError as error:
        raise OSError(f"the statistics are not available: {error}") from None
    rows = []
    for entry in found:
        times = entry["inference_stats"]
        row = {
            "model": entry["name"],
            "version": int(entry["version"]),
            "requests": times["success"]["count"],
            "failed": times["fail"]["count"],
            "executions": entry["execution_count"],
            "request": mean_seconds(times["success"]),
        }
        rows.append({**row, **{name: mean_seconds(times[name]) for name in TIMES}})
    return pd.DataFrame(rows).set_index(["model", "version"]).sort_index()


def mean_seconds(total: dict) -> float:
    """Mean seconds of {"count": n, "ns": sum}; NaN if the count is 0."""
    return total["ns"] / total["count"] / 1e9 if total["count"] else float("nan")


class Watch:
    """Samples the metrics every `every` seconds while a block runs; `frame` has a row per sample.

    A sample that gets no answer adds no row. prefix, by: as for `scrape`.
    """

    def __init__(
        self,
        server: TritonServer | str,
        every: float = 0.1,
        prefix: str = OURS,
        by: str | None = None,
    ):
        if not 0 < every < float("inf"):
            raise ValueError(f"every {every!r} is not an interval: give seconds above 0")
        self.server, self.every, self.prefix, self.by = server, every, prefix, by
        self._rows, self._end = [], threading.Event()

    def __enter__(self):
        self._begin = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._end.set()
        self._thread.join()
        self._look()  # so that the last row includes all of the block's work

    @property
    def frame(self) -> pd.DataFrame:
        """Column `seconds` since the block began, and one for each metric."""
        return pd.DataFrame(list(self._rows))

    def rate(self, name: str) -> pd.Series:
        """A counter's growth per second between successive samples, indexed by `seconds`."""
        frame = self.frame.set_index("seconds")
        # a counter that fell was reset: its model was loaded again
        return frame[name].diff().clip(lower=0) / frame.index.to_series().diff()

    def _run(self):
        while not self._end.wait(self.every):
            self._look()

    def _look(self):
        try:
            found = scrape(self.server, self.prefix, self.by)
        except LOST:
            return
        self._rows.append({"seconds": time.monotonic() - self._begin, **found})
