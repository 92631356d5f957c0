"""The load generator: no request is lost, and its figures match the requests."""

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from tests.patience import patience
from utils.serving.load import Load, arrivals, run, sweep, table, tokens_of

pytestmark = pytest.mark.thorough

LONG = 60.0  # seconds, far longer than any wait here


def test_closed_loop_sends_every_request_once():
    seen = []

    def send(i):
        seen.append(i)
        yield [i]
        yield [i, i]

    load = run(send, clients=3, requests=20)
    assert sorted(seen) == list(range(20)) == load.requests.index.tolist()
    rows = load.requests
    assert set(rows["client"]) <= {0, 1, 2}
    assert (rows["tokens"] == 3).all()
    assert (rows["pieces"] == 2).all()
    assert rows["error"].isna().all()
    assert load.errors == {}
    times = rows[["start", "sent", "first", "end"]].to_numpy(dtype=float)
    assert (np.diff(times, axis=1) >= 0).all()
    assert load.summary["requests"] == 20
    assert load.summary["tokens_per_second"] == pytest.approx(60 / load.seconds)
    assert load.seconds == rows["end"].max()


def test_clients_are_under_way_together():
    """Requests wait at a barrier for all clients: the load ends only if all are in flight."""
    together = threading.Barrier(4)

    def send(i):
        together.wait(LONG)
        return [1]

    load = run(send, clients=4, requests=8)
    assert load.errors == {}


def test_the_number_in_flight_is_looked_at():
    looks, gate = [], threading.Event()

    def send(i):
        if i == 2:  # the last one: held while the load samples three in flight
            threading.Timer(patience(1.5), gate.set).start()
        gate.wait(LONG)
        looks.append(i)
        return [1]

    load = run(send, clients=3, requests=3)
    assert load.in_flight["count"].max() == 3
    assert load.in_flight["seconds"].is_monotonic_increasing
    assert 0 < load.summary["in_flight"] <= 3


def test_errors_are_rows():
    def send(i):
        if i % 3 == 0:
            raise SystemExit("refused")
        yield [1]
        if i % 3 == 1:
            raise TimeoutError("broke off")

    load = run(send, clients=2, requests=9)
    assert load.errors == {"SystemExit: refused": 3, "TimeoutError: broke off": 3}
    assert load.summary["errors"] == 6
    rows = load.requests
    broken = rows[rows["error"] == "TimeoutError: broke off"]
    assert broken[["first", "end"]].notna().all(axis=None)
    assert rows.loc[0::3, "first"].isna().all()
    assert load.summary["requests_per_second"] == pytest.approx(3 / load.seconds)


def test_a_request_that_never_ends_is_a_row_and_the_load_ends():
    forever = threading.Event()

    def send(i):
        yield [1]
        if i == 1:
            forever.wait(LONG)
            yield [2]

    limit = patience(3)
    load = run(send, clients=2, requests=6, limit=limit)
    late = load.requests.loc[1]
    assert late["error"] == f"no end within the load's {limit} s"
    assert np.isnan(late["end"])
    assert not np.isnan(late["first"])
    assert load.requests["error"].isna().sum() == 5
    before = load.requests.copy()
    forever.set()  # what the late client does now changes nothing
    for thread in threading.enumerate():
        if thread.name.startswith("client "):
            thread.join(LONG)
    pd.testing.assert_frame_equal(load.requests, before)


def test_a_stream_is_closed_at_the_limit():
    closed = threading.Event()

    def send(i):
        try:
            while True:
                time.sleep(0.01)
                yield [1]
        finally:
            closed.set()

    load = run(send, clients=1, requests=1, limit=0.3)
    assert load.summary["errors"] == 1
    assert closed.wait(LONG)


def test_seconds_end_a_closed_loop():
    load = run(lambda i: time.sleep(0.01) or [1], clients=2, seconds=0.5)
    assert len(load.requests) >= 1
    assert load.requests["start"].max() < 0.5
    assert load.errors == {}


def test_open_loop_sends_at_the_drawn_moments():
    load = run(lambda i: [1], clients=4, requests=30, rate=200.0, seed=3)
    due = list(itertools.islice(arrivals(200.0, 3), 30))
    assert load.requests["start"].tolist() == due
    assert (load.requests["sent"] >= load.requests["start"]).all()
    other = run(lambda i: [1], clients=4, requests=30, rate=200.0, seed=4)
    assert other.requests["start"].tolist() != due


def test_open_loop_counts_the_wait_for_a_free_client():
    """While the first request holds the only client, the others arrive and their clocks run."""
    due = list(itertools.islice(arrivals(100.0, 0), 10))
    held = due[-1] + patience(1.5)

    def send(i):
        if i == 0:  # sent at due[0] or later, so that the last one has arrived when this ends
            time.sleep(held)
        return [1]

    load = run(send, clients=1, requests=10, rate=100.0)
    assert load.requests["start"].tolist() == due
    assert (load.requests["end"] > held).all()
    assert load.in_flight["count"].max() == 10  # nine of them without a client


def test_arrivals_without_a_free_client_are_rows():
    forever, limit = threading.Event(), patience(1)

    def send(i):
        forever.wait(LONG)
        return [1]

    load = run(send, clients=1, seconds=0.5, rate=100.0, limit=limit)
    forever.set()
    due = list(itertools.takewhile(lambda t: t < 0.5, arrivals(100.0)))
    assert load.requests["start"].tolist() == due
    assert load.errors == {
        f"no end within the load's {limit} s": 1,
        f"no free client within the load's {limit} s": len(due) - 1,
    }


def test_arrivals_are_poisson():
    gaps = np.diff([0.0, *itertools.islice(arrivals(5.0, 1), 20_000)])
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.03)  # of an exponential, equal to the mean
    assert (gaps > 1 / 5).mean() == pytest.approx(np.exp(-1), abs=0.02)


def made(rows, glances=(), seconds=10.0, clients=2):
    """A Load of rows (start, first, end, tokens, error)."""
    frame = pd.DataFrame(rows, columns=["start", "first", "end", "tokens", "error"])
    glances = pd.DataFrame(glances, columns=["seconds", "count"])
    return Load(frame, glances, seconds, clients)


def test_summary_of_known_requests():
    nan = float("nan")
    load = made(
        [
            (0.0, 0.5, 2.0, 4.0, None),
            (1.0, 1.25, 5.0, 6.0, None),
            (2.0, 2.0, 10.0, 1.0, None),
            (3.0, 3.5, 4.0, 2.0, "gone"),
            (4.0, nan, nan, 0.0, "no end"),
        ],
        [(0, 0), (1, 2), (2, 4)],
    )
    found = load.summary
    assert (found["requests"], found["errors"], found["clients"]) == (5, 2, 2)
    assert found["tokens_per_second"] == pytest.approx(11 / 10)
    assert found["requests_per_second"] == pytest.approx(3 / 10)
    assert found["latency_mean"] == pytest.approx((2 + 4 + 8) / 3)
    assert found["latency_p50"] == 4
    assert found["latency_p99"] == pytest.approx(np.quantile([2, 4, 8], 0.99))
    assert found["first_mean"] == pytest.approx(0.25)
    assert found["time_per_token"] == pytest.approx((1.5 + 3.75) / (3 + 5))
    assert found["in_flight"] == pytest.approx((0 * 1 + 2 * 1 + 4 * 8) / 10)  # averaged over time
    # λ = 4 ended in 10 s; W = the mean of 2, 4, 8 and 1 s
    assert found["little"] == pytest.approx(4 / 10 * 15 / 4)
    assert "5 requests by 2 clients in 10.0 s, 2 failed" in str(load)
    # per token after the first: 0.5, 0.75 and, for a single token, nothing
    assert load.goodput() == pytest.approx(found["requests_per_second"])
    assert load.goodput(first=0.25) == pytest.approx(2 / 10)
    assert load.goodput(per_token=0.5) == pytest.approx(2 / 10)
    assert load.goodput(first=0.25, per_token=0.5) == pytest.approx(1 / 10)


def test_summary_without_one_good_request():
    load = run(lambda i: 1 / 0, clients=2, requests=4)
    found = load.summary
    assert found["errors"] == 4
    assert found["requests_per_second"] == 0
    assert np.isnan(found["latency_p50"])
    assert np.isnan(found["tokens_per_second"])
    assert load.errors == {"ZeroDivisionError: division by zero": 4}


@pytest.mark.parametrize(
    ("piece", "tokens"),
    [
        ([1, 2, 3], 3),
        (np.arange(4), 4),
        (7, 1),
        (SimpleNamespace(tokens=[5, 6], text="ab"), 2),
        ([], 0),
    ],
)
def test_tokens_of_a_piece(piece, tokens):
    assert tokens_of(piece) == tokens


def test_texts_need_a_counter():
    load = run(lambda i: "three short words", clients=1, requests=2)
    assert np.isnan(load.summary["tokens_per_second"])
    load = run(lambda i: "three short words", 1, 2, count=lambda text: len(text.split()))
    assert load.requests["tokens"].tolist() == [3, 3]


def test_sweep_numbers_requests_on():
    seen = []
    loads = sweep(lambda i: seen.append(i) or [1], (1, 2, 4), per_client=3)
    assert sorted(seen) == list(range(3 + 6 + 12))
    assert [load.clients for load in loads.values()] == [1, 2, 4]
    frame = table(loads)
    assert frame.index.tolist() == [1, 2, 4]
    assert frame["requests"].tolist() == [3, 6, 12]
    assert {"tokens_per_second", "latency_p95", "first_p50", "little"} <= set(frame.columns)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clients": 0}, "clients 0 is not a number of clients"),
        ({"clients": 2.0}, "clients 2.0"),
        ({"requests": None}, "has no end: give requests or seconds"),
        ({"requests": 0}, "requests 0"),
        ({"rate": -1.0}, "rate -1.0 is not a positive number"),
        ({"seconds": float("nan")}, "seconds nan"),
        ({"limit": 0}, "limit 0"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        run(lambda i: [1], **({"clients": 1, "requests": 1} | changes))
