"""A served model whose processes die or stop: clients are told, and it recovers by itself."""

import os
import signal
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.patience import patience
from tests.serving.probe import (
    MODELS,
    Asked,
    astream,
    frozen,
    generate,
    gone,
    processes,
    stream,
    tokens,
)
from tests.serving.processes import PATIENCE, until
from tests.serving.world import configure, kintsugi, pids, ranks, repo_of, serving
from utils.serving.client import Client, ServeError
from utils.serving.gateway import Gateway
from utils.serving.gateway.stubs import stop_at_rest

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

SAMPLES = [("def ", 1), ("import ", 2), ("The first", 3)]  # text, seed
TEXT, TOKENS = "def ", [40, 41]  # the model continues them up to any limit
LONG = 480  # tokens: at least a second of work


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repo = repo_of("small", 2, tmp_path_factory.mktemp("faults") / "repo")
    configure(repo, max_num_seqs=4, queue=6, step_seconds=60)
    # a killed stub's requests never end for Triton, so the server would wait for them
    with serving(repo, models=MODELS, exit_seconds=2) as server:
        yield server


@pytest.fixture(scope="module")
def before(client):
    return answers(client)


def answers(client):
    """The answers to a few requests; the seeds make them reproducible."""
    return [client.generate(text, max_tokens=12, temperature=1.0, seed=n) for text, n in SAMPLES]


def cut_off(server, client, disturb, doors=(generate, stream, astream, tokens)):
    """Ask through all doors, disturb the server while all are in flight, return the requests."""
    for _ in range(10):
        asked = [
            Asked(door, client, TOKENS if door is tokens else TEXT, max_tokens=LONG)
            for door in doors
        ]
        for request, door in zip(asked, doors):
            if door is not generate:
                request.wait_for_piece()
        with frozen(*ranks(server)):
            if all(request.is_alive() for request in asked):
                disturb()
                return asked
        through = [request.outcome() for request in asked]  # one ended too early
        errors = [outcome for outcome in through if isinstance(outcome, ServeError)]
        assert not errors, errors
    raise AssertionError("the requests were never in flight together")


def refused_meanwhile(client):
    """The errors that a client of the engine sees until it is served again."""
    errors, end = [], time.monotonic() + PATIENCE
    while isinstance(outcome := Asked(tokens, client, TOKENS, max_tokens=1).outcome(), ServeError):
        errors.append(outcome)
        assert time.monotonic() < end, outcome
    return errors


def check_serves_as_before(server, client, before, old):
    until(lambda: isinstance(Asked(generate, client, TEXT, max_tokens=1).outcome(), str))
    until(lambda: server.ready("gpt"))
    assert answers(client) == before
    until(lambda: gone(old))
    until(lambda: len(ranks(server)) == 2)  # an ending engine has none but may still exist


def test_killed_rank(server, client, before):
    """Requests in flight get an error that names the rank; not ready until it is replaced."""
    rank, old, restarts = 1, ranks(server), kintsugi(server)["rank_restarts_total"]
    asked = cut_off(server, client, lambda: os.kill(old[rank], signal.SIGKILL))
    until(lambda: not server.ready("gpt"))
    errors = [request.outcome() for request in asked] + refused_meanwhile(client)
    assert len(errors) > len(asked)
    for error in errors:
        assert isinstance(error, ServeError), error
        assert error.status == "UNAVAILABLE", error
        assert f"rank {rank} of 2 (process {old[rank]}) was killed by SIGKILL" in str(error)
    assert all("the request was cut off" in str(error) for error in errors[: len(asked)])
    assert all("try again later" in str(error) for error in errors[len(asked) :])
    check_serves_as_before(server, client, before, old)
    until(lambda: kintsugi(server)["rank_restarts_total"] == restarts + 1)
    until(lambda: kintsugi(server)["ready"] == 1)


def test_stopped_rank(server, client, before):
    """A rank that hangs counts as dead after step_seconds."""
    config = server.config("gpt_engine")
    patient, limit = config["parameters"]["step_seconds"]["string_value"], patience(3)
    try:
        config["parameters"]["step_seconds"]["string_value"] = str(limit)
        load_engine(server, config)
        old = ranks(server)
        asked = cut_off(server, client, lambda: os.kill(old[1], signal.SIGSTOP))
        os.kill(old[1], signal.SIGSTOP)  # `cut_off` has continued it
        for request in asked:
            error = request.outcome()
            assert isinstance(error, ServeError), error
            assert error.status == "UNAVAILABLE", error
            why = f"rank 1 of 2 (process {old[1]}) is stopped: no answer in {limit} sec"
            assert why in str(error)
        check_serves_as_before(server, client, before, old)
    finally:
        config["parameters"]["step_seconds"]["string_value"] = patient
        load_engine(server, config)


def load_engine(server, config):
    """Load another configuration, and wait until the previous engine has ended."""
    before = pids(server)["gpt_engine"]
    server.load("gpt_engine", config)
    until(lambda: gone([before]))


@pytest.fixture(scope="module")
def gateway(server):
    with Gateway(server) as gateway:
        yield gateway


@pytest.mark.parametrize("model", MODELS)
def test_killed_stub(server, gateway, before, model):
    """The process of a model's code dies: Triton leaves it dead, and the gateway reloads it."""

    def kill():
        stop_at_rest(dead)
        os.kill(dead, signal.SIGKILL)

    client = Client(gateway, timeout=PATIENCE)
    until(lambda: readiness(gateway) == 200)
    dead, old = pids(server)[model], ranks(server)
    if model in ("gpt", "gpt_engine"):
        doors = (generate, stream, astream)
        asked = cut_off(server, client, kill, doors)
    else:
        with frozen(dead):
            asked = [Asked(door, client, TEXT, max_tokens=5) for door in (generate, stream)]
            kill()
    seen = {until(lambda: readiness(gateway) != 200 and readiness(gateway))}
    outcomes = [request.outcome() for request in asked]
    errors = [outcome for outcome in outcomes if isinstance(outcome, ServeError)]
    # unanswered requests may have reached the new process, or not needed it
    assert len(errors) == 3 or model not in ("gpt", "gpt_engine"), outcomes
    assert all(outcome.startswith(TEXT) for outcome in outcomes if outcome not in errors)
    for error in errors:
        assert error.status == "UNAVAILABLE", error
        assert model in str(error) or "not healthy" in str(error), error
    until(lambda: seen.add(readiness(gateway)) or 200 in seen)
    assert seen == {503, 200}  # no other status until everything is served again
    check_serves_as_before(server, client, before, [dead] + (old if model == "gpt_engine" else []))
    assert set(pids(server)) == set(MODELS)
    until(lambda: len(processes(server)) == 1 + len(MODELS) + 1 + 3)  # the old ones have gone


def test_a_stopped_stub_is_no_ready_one(server, gateway):
    """Stopped briefly, it is ready once it continues; stopped for longer, it is replaced."""
    until(lambda: readiness(gateway) == 200)
    stub = pids(server)["gpt_detokenize"]
    with frozen(stub):
        until(lambda: readiness(gateway) == 503)
    until(lambda: readiness(gateway) == 200)
    stop_at_rest(stub)
    until(lambda: readiness(gateway) == 503)
    until(lambda: readiness(gateway) == 200)
    assert pids(server)["gpt_detokenize"] != stub


def readiness(gateway):
    """The HTTP status that a load balancer sees."""
    try:
        with urlopen(f"http://{gateway.http}/v2/health/ready", timeout=PATIENCE) as answer:
            return answer.status
    except HTTPError as error:
        with error:
            return error.code
