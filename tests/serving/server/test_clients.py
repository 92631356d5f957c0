"""Cancelling a request, the metrics of the served model, reloading the engine."""

from contextlib import closing, suppress

import pytest

from tests.serving.probe import at_rest, check_leaving, frozen
from tests.serving.processes import PATIENCE, until
from tests.serving.world import (
    ENGINE,
    company,
    configure,
    kintsugi,
    pids,
    ranks,
    text_of,
)
from utils.serving import metrics
from utils.serving.client import ServeError, tensors

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

LONG = 400  # tokens: longer than it takes to cancel


@pytest.fixture(scope="module")
def server(small_server):
    return small_server


def test_a_request_cancelled_by_its_id(server, client):
    def cancel():
        (word,) = client.infer("gpt_engine", tensors({"cancel": "the one"}, ENGINE))
        return word.as_numpy("finish_reason")[0]

    def ask():
        answers = client.tokens([7, 8], max_tokens=LONG, request_id="the one")
        assert next(answers)

        def leave():
            if cancel() == b"cancelled":  # else it had already ended
                with pytest.raises(ServeError, match=r"^CANCELLED: "):
                    list(answers)

        return leave

    check_leaving(server, ask)
    assert cancel() == b""


# ---- metrics


def test_metrics_count_what_was_served(server):
    until(lambda: at_rest(server))
    before = kintsugi(server)
    for _ in range(3):
        text_of(server, "def ", max_tokens=7)
    for name, new in {
        "tokens_total": 21,
        "requests_total": 3,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 18,
        "e2e_request_latency_seconds_count": 3,
    }.items():  # they are published one at a time
        until(lambda name=name, new=new: kintsugi(server)[name] == before.get(name, 0) + new)
    until(lambda: kintsugi(server)["requests_running"] == 0)
    now = kintsugi(server)
    frame = metrics.metrics(server)
    buckets = frame[frame["name"] == "kintsugi_e2e_request_latency_seconds_bucket"]
    buckets = buckets.assign(le=buckets["le"].astype(float)).sort_values("le")
    assert buckets["value"].is_monotonic_increasing and buckets["le"].iloc[-1] == float("inf")
    assert buckets["value"].iloc[-1] == now["e2e_request_latency_seconds_count"]
    assert now["ready"] == 1
    assert now["requests_failed_total"] == now["rank_restarts_total"] == 0
    assert 0 < now["time_to_first_token"] < PATIENCE


def test_metrics_of_the_moment(server, client):
    def running():
        return (now := kintsugi(server))["requests_running"] == 1 and now

    now = None
    for _ in range(4):  # on a busy machine the answer may end before the ranks stop
        with closing(client.tokens([7, 8], max_tokens=LONG)) as pieces:
            assert next(pieces)
            with frozen(*ranks(server)), suppress(AssertionError):
                now = until(running, PATIENCE / 4)
                break
    assert now["batch_occupancy"] == 1 / 16
    assert 0 < now["kv_use"] < 1 / 16
    assert now["tokens_per_second"] > 0


# ---- the same version again: a new instance takes over from the old one


def test_who_loads_the_engine_again_still_gets_in(server, small_reference):
    expected = small_reference.text("def ", 8)
    try:
        configure(server.repo, max_num_seqs=12)
        with company(server, 4):
            server.load("gpt_engine")
        assert text_of(server, "def ", max_tokens=8) == expected
    finally:  # as other tests expect it
        configure(server.repo, max_num_seqs=16)
        server.load("gpt_engine")
    until(lambda: len(pids(server)) == 4)
