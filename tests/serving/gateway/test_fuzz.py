"""Ten thousand malformed requests to the gateway beside good ones: nothing ends, nothing hangs.

What server/test_fuzz.py sends to Triton, and what that leaves out because it ends the server or is
taken for something else: bodies of up to 64 MB, absurd shapes, numbers that are too large. A
failure names the number of the request: `send(gateway, number)` sends it again.
"""

import json
import random
import threading
from collections import Counter

import pytest

from tests.serving.garbage import (
    GENERATE,
    generate_json,
    generate_text,
    half_sent,
    infer_binary,
    post,
    unknown_path,
)
from tests.serving.probe import Asked, at_rest, generate, processes, stream
from tests.serving.processes import PATIENCE, until
from utils.serving.client import Client
from utils.serving.gateway import Gateway

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

MANY = 10_000
LARGEST = 64 << 20  # bytes
# 408 is a body that does not come, 413 one that is too large
EXPECTED = {400, 404, 405, 413, "closed"}


def large(gateway, random):
    """A body of any size, good JSON at its beginning or none."""
    size = int(2 ** random.uniform(0, 26)) if random.random() < 0.05 else random.randrange(200_000)
    begin = random.choice([b'{"text_input": "a", "max_tokens": 0}', b"[", b'{"text_input": "', b""])
    fill = random.choice([b" ", b"a", b"[", b"\0", b"\xff"])
    body = (begin + fill * size)[: min(size, LARGEST)]
    return post(gateway, random.choice(GENERATE), body)


def absurd(gateway, random):
    """Shapes that no memory holds, numbers beyond their type, tensors without end."""
    many = random.choice([2**31, 2**40, 2**62, 2**63 - 1, 2**64, 10**30, -1, -(2**63)])
    shape = random.choice([[many], [1, many], [many, many], [many, 0], [2**20] * 4, [0.5], "all"])
    tensor = {"name": "text", "shape": shape, "datatype": "BYTES", "data": ["a"]}
    path = "/v2/models/gpt_tokenize/infer"
    if random.random() < 0.3:
        name = random.choice(["max_tokens", "top_k", "seed"])
        value = random.choice([2**31, 2**32 + 4, 2**63, 10**40, -(2**31) - 1])
        value = value if name != "seed" else value * 2**33
        return post(gateway, GENERATE[0], json.dumps({"text_input": "a", name: value}).encode())
    headers = {}
    body = json.dumps({"inputs": [tensor] * random.choice([1, 1, 1000])}).encode()
    if random.random() < 0.3:
        headers = {"Inference-Header-Content-Length": str(random.choice([0, 7, len(body), many]))}
    return post(gateway, path, body, headers)


KINDS = (generate_json, generate_text, infer_binary, half_sent, unknown_path, large, absurd)


def send(gateway, number):
    """Sends malformed request `number`; (kind, what came back)."""
    kind = KINDS[number % len(KINDS)]
    return kind.__name__, kind(gateway, random.Random(f"gateway/{number}"))


def test_malformed_requests_beside_good_ones(tiny_server):
    with Gateway(tiny_server) as gateway:
        fuzz(tiny_server, gateway)


def fuzz(server, gateway):
    client = Client(gateway, timeout=PATIENCE)
    right = [ask(client, number) for number in range(8)]
    before, front = processes(server), gateway.pid
    answers, broken, wrong, good = {}, [], [], []
    numbers, done, lock = iter(range(MANY)), threading.Event(), threading.Lock()

    def disturb():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                answers[number] = send(gateway, number)
            except Exception as error:
                broken.append((number, repr(error)))

    def work():
        number = 0
        while not done.is_set():
            good.append(ask(client, number % 8))
            if good[-1] != right[number % 8]:
                wrong.append(good[-1])
            number += 1

    disturbers = [threading.Thread(target=disturb) for _ in range(4)]
    worker = threading.Thread(target=work)
    for thread in [*disturbers, worker]:
        thread.start()
    for thread in disturbers:
        thread.join(800)
        assert not thread.is_alive()
    done.set()
    worker.join(PATIENCE)
    assert not worker.is_alive()

    assert not broken, broken[:5]
    assert len(answers) == MANY
    unexpected = [(n, kind) for n, (kind, said) in answers.items() if said not in EXPECTED]
    assert not unexpected, (unexpected[:5], Counter(answers.values()))
    assert {413, 400} <= {said for _, said in answers.values()}
    assert good
    assert not wrong, wrong[:5]
    assert processes(server).keys() == before.keys()
    assert (gateway.alive(), gateway.pid) == (True, front)
    until(lambda: at_rest(server))


def ask(client, number):
    door = (generate, stream)[number % 2]
    return Asked(door, client, f"def {number}", max_tokens=6).outcome()
