"""Clients that leave mid-answer: the engine is told, and what they held is freed."""

import threading

import pytest

from tests.patience import patience
from tests.serving.probe import (
    Asked,
    astream,
    at_rest,
    check_leaving,
    frozen,
    generate,
    processes,
    served_now,
    stream,
    tokens,
)
from tests.serving.processes import PATIENCE, until
from tests.serving.world import SLOTS, kintsugi, ranks
from utils.serving.client import Client, ServeError

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

TEXT, TOKENS = "def ", [40, 41]  # the model continues them up to any limit
LONG = 480


@pytest.fixture(scope="module")
def server(tiny_server):
    return tiny_server


@pytest.mark.parametrize("door", [stream, astream, tokens])
def test_client_gone_mid_stream(server, client, door):
    def ask():
        answer = door(client, TOKENS if door is tokens else TEXT, max_tokens=LONG)
        next(answer)
        return answer.close

    check_leaving(server, ask)
    assert client.generate(TEXT, max_tokens=3)


@pytest.mark.parametrize("door", [astream, tokens])
def test_client_gone_while_it_waits(server, client, door):
    """A client without a slot: its place in the queue is freed, and the others continue."""
    check_gone_while_it_waits(server, client, door, SLOTS)


def test_http_client_gone_while_it_waits(server, client):
    """Triton's HTTP side checks for the client from the first response on, and cancels then.

    For the same reason a `generate`, which has one response, runs to its end without a client.
    """
    check_gone_while_it_waits(server, client, stream, SLOTS + 1)


def check_gone_while_it_waits(server, client, door, left):
    """left: requests in the engine, before its next step, after one of SLOTS + 1 clients left."""
    until(lambda: at_rest(server))
    before = kintsugi(server)["requests_cancelled_total"]
    with frozen(*ranks(server)):
        asked = [Asked(generate, client, TEXT, max_tokens=5) for _ in range(SLOTS)]
        until(lambda: served_now(server) == SLOTS)
        hasty = Client(server, timeout=patience(5))  # it leaves when its time is up
        late = Asked(door, hasty, TOKENS if door is tokens else TEXT, max_tokens=LONG)
        until(lambda: served_now(server) == SLOTS + 1)
        assert isinstance(late.outcome(), ServeError)
        until(lambda: served_now(server) == left)
    assert len({request.outcome() for request in asked}) == 1
    until(lambda: kintsugi(server)["requests_cancelled_total"] == before + 1)
    until(lambda: at_rest(server))


def test_many_clients_gone(server, client):
    """More than `gpt` takes at once: if each kept its place, `gpt` would refuse all others."""
    most = int(server.config("gpt")["parameters"]["requests"]["string_value"])
    begun, all_begun = [], threading.Event()

    def come_and_go():
        while not all_begun.is_set():
            try:
                answer = stream(client, TEXT, max_tokens=LONG)
                next(answer)
                answer.close()
                begun.append(1)
            except ServeError as error:  # earlier departures have not been noticed yet
                assert error.status == "UNAVAILABLE"
            if len(begun) > most:
                all_begun.set()

    threads = [threading.Thread(target=come_and_go) for _ in range(2 * SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(begun) > most
    until(lambda: at_rest(server))
    assert Asked(generate, client, TEXT, max_tokens=3).outcome()


def test_streams_by_the_hundred_and_some_are_left(server, client):
    """Answers are right and complete, every process survives, and nothing stays in use."""
    wanted = [{"max_tokens": 16, "temperature": 1.0, "seed": seed} for seed in range(8)]
    right = [client.generate(TEXT, **sampling) for sampling in wanted]
    before, wrong, served = processes(server), [], []

    def ask(number):
        for turn in range(10):
            which = (number + turn) % len(right)
            door = (stream, astream)[turn % 2]
            answer = door(client, TEXT, **wanted[which])
            if turn % 5 == 4:
                next(answer)
                answer.close()
                continue
            text = "".join(answer)
            served.append(which)
            if text != right[which]:
                wrong.append((which, text))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert len(served) == 16 * 8
    assert not wrong
    assert processes(server).keys() == before.keys()
    until(lambda: at_rest(server))
