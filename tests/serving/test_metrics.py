"""Metrics and statistics of a real server as frames; the order of an engine's own updates."""

import importlib.util
import socket
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.serving.processes import until
from tests.serving.triton_models import settled
from utils.paths import ROOT
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

    # Triton counts a request a moment after its answer
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

    # Triton counts a moment after the answer, and no errors of a decoupled model
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
    with pytest.raises(ValueError, match="every 0 is not an interval"):
        metrics.Watch(server, every=0)


def test_a_watch_of_a_server_that_has_gone_has_no_rows():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        with metrics.Watch(f"127.0.0.1:{listener.getsockname()[1]}", every=0.01) as watch:
            pass
    assert watch.frame.empty


def test_whoever_sees_an_engine_at_rest_finds_all_counted(monkeypatch):
    """Metrics go to Triton one at a time, and a client may read them in between."""
    told, values = [], {}

    class Family(SimpleNamespace):
        COUNTER, GAUGE = "counter", "gauge"

        def __init__(self, name, description, kind):
            super().__init__(name=name, kind=kind)

        def Metric(self, labels):
            return SimpleNamespace(increment=self.tell, set=self.tell)

        def tell(self, value):
            told.append(self.kind)
            values[self.name] = value

    triton = SimpleNamespace(MetricFamily=Family, TRITONSERVER_RESPONSE_COMPLETE_FINAL=1)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = ROOT / "triton_model_repo/gpt_engine/model.py"
    spec = importlib.util.spec_from_file_location("served_model", file)
    spec.loader.exec_module(served := importlib.util.module_from_spec(spec))

    stats = Counter(dict.fromkeys([*served.COUNTERS, *served.GAUGES], 1))
    took = SimpleNamespace(counts=[1] * len(served.BOUNDS), sum=1.0, count=1)
    histograms = dict.fromkeys(served.HISTOGRAMS, took)
    engine = SimpleNamespace(stats=lambda: stats, histograms=lambda: histograms)
    shown = served.Metrics({})
    shown.tell(engine)
    assert told == sorted(told) and set(told) == {"counter", "gauge"}
    shown.leave()  # as the version does: it is no longer ready, and its counts stay
    assert (values["kintsugi_ready"], values["kintsugi_queue_waiting"]) == (0, 0)
    assert values["kintsugi_tokens_total"] == 1
