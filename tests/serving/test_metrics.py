"""Metrics and statistics of a real server, as frames."""

import socket

import pytest

from tests.serving.processes import until
from tests.serving.triton_models import settled
from utils.serving import metrics
from utils.serving.client import Client, ServeError

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(toy_server):
    return toy_server


def test_metrics_agree_with_what_was_asked(server, client):
    words = settled(server)["words_total"]
    before = metrics.scrape(server, "nv_inference_", by="model")
    for _ in range(3):
        Client(server, model="echo").generate("a")
    list(client.stream("a b c d"))

    def now():
        return metrics.scrape(server, "nv_inference_", by="model")

    # Triton counts a request a moment after its answer has gone
    until(lambda: now()["request_success echo"] == before["request_success echo"] + 3)
    until(lambda: now()["request_success gpt"] == before["request_success gpt"] + 1)
    assert metrics.scrape(server)["words_total"] == words + 4
    frame = metrics.metrics(server)
    assert (frame.columns[0], frame.columns[-1]) == ("name", "value")
    assert metrics.scrape(server, "nothing_").empty


def test_statistics_count_requests_and_failures(server, client):
    before = metrics.statistics(server)
    assert {("echo", 1), ("slow", 1), ("gpt", 1)} <= set(before.index)
    Client(server, model="echo").generate("a")
    with pytest.raises(ServeError, match="could not convert"):
        Client(server, model="slow").generate("x")
    with pytest.raises(ServeError):
        client.generate("a", max_tokens=-1)
    assert list(metrics.statistics(server, "echo").index) == [("echo", 1)]

    def grown():
        difference = metrics.statistics(server) - before
        return [difference["requests"][name, 1] for name in ("echo", "gpt")], [
            difference["failed"][name, 1] for name in ("slow", "gpt")
        ]

    # Triton counts a moment after the answer has gone, and no error of a decoupled model
    until(lambda: grown() == ([1, 1], [1, 0]))
    row = metrics.statistics(server).loc[("echo", 1)]
    assert row["request"] >= row["compute_infer"] > 0
    with pytest.raises(OSError, match="nothing"):
        metrics.statistics(server, "nothing")


def test_a_watch_sees_a_load_from_begin_to_end(server, client):
    before = settled(server)["words_total"]
    with metrics.Watch(server, every=0.02) as watch:
        list(client.stream("a b c d e f g h"))
    frame = watch.frame
    assert frame["words_total"].iloc[0] == before and frame["words_total"].iloc[-1] == before + 8
    assert frame["words_total"].is_monotonic_increasing and frame["seconds"].is_monotonic_increasing
    rate = watch.rate("words_total")
    gaps = frame["seconds"].diff()
    assert (rate.to_numpy()[1:] * gaps.to_numpy()[1:]).sum() == pytest.approx(8)
    with pytest.raises(ValueError, match="every 0 is no time"):
        metrics.Watch(server, every=0)


def test_a_watch_of_a_server_that_has_gone_has_no_rows():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        with metrics.Watch(f"127.0.0.1:{listener.getsockname()[1]}", every=0.01) as watch:
            pass
    assert watch.frame.empty
