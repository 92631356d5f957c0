"""Two thousand malformed requests beside good ones: none succeeds, none does harm.

Everything that `garbage.py` has, which says what is left out. A failure names the seed and
the number of the request: `send(server, seed, number)` sends it again.
"""

import random
import threading
from collections import Counter

import pytest

from tests.serving.garbage import KINDS
from tests.serving.probe import Asked, astream, at_rest, generate, processes, stream, tokens
from tests.serving.processes import PATIENCE, until
from utils.serving.client import Client

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

SEED = 14
MANY = 2100
DOORS = (generate, stream, astream, tokens)


@pytest.fixture(scope="module")
def server(tiny_server):
    return tiny_server


def send(server, seed, number):
    """Sends malformed request `number`; (kind, what came back)."""
    kind = KINDS[number % len(KINDS)]
    return kind.__name__, kind(server, random.Random(f"{seed}/{number}"))


def ask(client, number):
    door = DOORS[number % len(DOORS)]
    subject = [40 + number] if door is tokens else f"def {number}"
    return Asked(door, client, subject, max_tokens=6).outcome()


def test_malformed_requests_beside_good_ones(server):
    client = Client(server, timeout=PATIENCE)
    right = [ask(client, number) for number in range(8)]
    before = processes(server)
    answers, broken, wrong, good = {}, [], [], []
    numbers, done = iter(range(MANY)), threading.Event()
    lock = threading.Lock()

    def disturb():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                answers[number] = send(server, SEED, number)
            except Exception as error:
                broken.append((number, repr(error)))

    def work(offset):
        number = offset
        while not done.is_set():
            outcome = ask(client, number % 8)
            good.append(outcome)
            if outcome != right[number % 8]:
                wrong.append(outcome)
            number += 1

    disturbers = [threading.Thread(target=disturb) for _ in range(4)]
    workers = [threading.Thread(target=work, args=(4 * n,)) for n in range(2)]
    for thread in disturbers + workers:
        thread.start()
    for thread in disturbers:
        thread.join(600)
        assert not thread.is_alive()
    done.set()
    for thread in workers:
        thread.join(PATIENCE)
        assert not thread.is_alive()

    assert not broken, broken[:5]
    assert len(answers) == MANY
    accepted = [(n, kind) for n, (kind, status) in answers.items() if status in (200, "OK")]
    assert not accepted, accepted[:5]
    kinds = Counter(answers.values())
    assert {kind for kind, _ in kinds} == {kind.__name__ for kind in KINDS}
    for _, status in kinds:  # 500: JSON that Triton cannot read; 501: no such thing here
        assert status in (400, 404, 405, 500, 501, "closed") or isinstance(status, str), kinds
    assert not {status for _, status in kinds} & {"DEADLINE_EXCEEDED", "UNAVAILABLE"}, kinds
    assert good
    assert not wrong, wrong[:5]
    assert [ask(client, number) for number in range(8)] == right
    assert processes(server).keys() == before.keys()
    until(lambda: at_rest(server))
