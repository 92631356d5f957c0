"""More requests than a server accepts: it refuses clearly, loses none, keeps none in memory."""

import json
import threading
import time

import pytest

from tests.serving.probe import (
    Asked,
    astream,
    at_rest,
    frozen,
    generate,
    memory,
    processes,
    served_now,
    stream,
    tokens,
)
from tests.serving.processes import PATIENCE, until
from tests.serving.world import QUEUE, SLOTS, kintsugi, post, ranks
from utils.serving.client import ServeError

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

DOORS = (generate, stream, astream)
TEXT, TOKENS = "def ", [40, 41]  # the model continues them up to any limit


@pytest.fixture(scope="module")
def server(tiny_server):
    return tiny_server


def samples(count):
    """Keyword arguments of requests whose answers differ."""
    return [
        {"text": TEXT, "max_tokens": 8, "temperature": 1.0, "seed": number}
        for number in range(count)
    ]


def overload(server, client, right, extra, note=""):
    """Send `extra` requests to a full engine: accepted ones are right, refused ones say why."""
    until(lambda: at_rest(server))
    rejected = kintsugi(server)["requests_rejected_total"]
    with frozen(*ranks(server)):
        accepted = [Asked(generate, client, **wanted) for wanted in samples(len(right))]
        until(lambda: served_now(server) == len(right))
        errors = []

        def more():
            for _ in range(extra // 8):
                errors.append(post(server, text_input=TEXT * 200, max_tokens=8, note=note))

        threads = [threading.Thread(target=more) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        direct = Asked(tokens, client, TOKENS, max_tokens=8).outcome()
        assert len(errors) == extra // 8 * 8
        for status, answer in errors:
            message = json.loads(answer)["error"]
            assert status >= 400
            assert message.startswith("UNAVAILABLE: the queue is full"), message
        until(lambda: kintsugi(server)["requests_rejected_total"] == rejected + len(errors) + 1)
        assert served_now(server) == len(right)
    assert isinstance(direct, ServeError)
    assert direct.status == "UNAVAILABLE"
    assert [request.outcome() for request in accepted] == right
    until(lambda: at_rest(server))


@pytest.fixture(scope="module")
def right(client):
    """The right answers to the accepted requests."""
    return [client.generate(**wanted) for wanted in samples(SLOTS + QUEUE)]


def test_overload_at_full_speed(server, client, right):
    """Three times as many clients as places, through all doors; each asks until it was served twice
    and some request was refused. All processes survive."""
    wanted, wrong, refused, before = samples(len(right)), [], [], processes(server)
    limit = time.monotonic() + PATIENCE / 2

    def ask(number):
        served = 0
        while served < 2 or (not refused and time.monotonic() < limit):
            which, door = (number + served) % len(right), DOORS[(number + served) % len(DOORS)]
            outcome = Asked(door, client, **wanted[which]).outcome()
            if isinstance(outcome, ServeError):
                refused.append(str(outcome))
                continue
            served += 1
            if outcome != right[which]:
                wrong.append((which, door, outcome))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(3 * (SLOTS + QUEUE))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert not wrong
    assert refused
    assert {reason[:30] for reason in refused} == {"UNAVAILABLE: the queue is full"}
    assert processes(server).keys() == before.keys()
    until(lambda: at_rest(server))


def test_overload_keeps_no_memory(server, client, right):
    """Refused requests carry 100 KB each: 500 of them would leave 50 MB if any part of the server
    kept what they sent; 10 MB are allowed."""
    assert len(set(right)) > 1
    note = "x" * 100_000
    for _ in range(2):  # until all threads, buffers and caches exist
        overload(server, client, right, extra=160, note=note)
    before = memory(server)
    for _ in range(3):
        overload(server, client, right, extra=168, note=note)
    grown = memory(server) - before
    assert grown < 10e6, f"{grown / 1e6:.1f} MB more"
