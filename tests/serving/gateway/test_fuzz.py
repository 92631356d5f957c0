"""Ten thousand malformed HTTP and gRPC requests among good ones: nothing dies, nothing hangs.

Each is certainly malformed, so none may succeed; bodies have up to 64 MB. The result is an HTTP
status, or "closed" if the connection ended without an answer. A failure names the number of the
request: `send(gateway, number)` sends it again.
"""

import http.client
import json
import random
import socket
import struct
import threading
from collections import Counter

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.serving.probe import Asked, at_rest, generate, processes, stream
from tests.serving.processes import PATIENCE, until
from utils.serving.client import Client
from utils.serving.gateway import Gateway

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

MANY = 10_000
LARGEST = 64 << 20  # bytes
EXPECTED = {400, 401, 404, 405, 413, "closed"}  # 413: the body is too large
LIMIT = 60.0  # seconds that a single request may take
SERVICE = "/inference.GRPCInferenceService/"
GENERATE = ("/v2/models/gpt/generate", "/v2/models/gpt/generate_stream")


def generate_json(gateway, random):
    """A JSON request with one invalid field, to either endpoint."""
    good = {"text_input": "def ", "max_tokens": 3, "temperature": 0.5, "top_k": 3, "seed": 1}
    name, values = random.choice(
        [
            ("text_input", [5, None, {}, [], ["a", "b"], "", "x" * 70_000, True, 1e9]),
            ("max_tokens", [0, -2, -(2**31), 2**31 - 1, "a", "", {}, [], 0.5, 600]),
            ("temperature", [-1, -0.1, -1e30, "hot", {}, [], [1, 2], "", "nan"]),
            ("top_k", [-1, -(2**31), "a", {}, [], [3, 4], 2.5]),
            ("top_p", [-1, 0, 1.01, 5, 1e30, "a", {}, [], [0.5, 0.6]]),
            ("logprobs", [-1, 21, 2**31 - 1, "a", "", {}, [], [1, 2], 2.5]),
            ("seed", [-1, -(2**63), "a", {}, [], [1, 2], 1.5]),
            ("stop", [[""], ["x" * 65], ["a"] * 9, 5, {}, [5], [None], [["a", "b"]], [{}]]),
            ("prompt_name", ["absent", "../1", "\0", "x" * 3000, 5, {}, ["a", "b"]]),
            ("stream", ["yes", {}, [], [True, False], 7]),
            ("exclude_input_in_output", ["no", {}, [], [True, False], -3]),
        ]
    )
    body = {**good, name: random.choice(values)}
    return post(gateway, random.choice(GENERATE), json.dumps(body).encode())


def generate_text(gateway, random):
    """Bodies that are not JSON objects: truncated, binary, deeply nested, empty, another type."""
    good = json.dumps({"text_input": "def ", "max_tokens": 3}).encode()
    cut = random.randrange(len(good))
    body = random.choice(
        [
            good[:cut],
            good[:1] + random.randbytes(random.randrange(1, 9)) + good,
            random.randbytes(random.randrange(200)),
            b"[" * random.randrange(1, 2000),
            b'{"a":' * random.randrange(1, 500),
            b"",
            b"\xef\xbb\xbf" + good[1:],
            b'"text"',
            b"[1, 2]",
            b"null",
            b"NaN",
            good.replace(b"def ", b"\\ud800\\u12"),
            good.replace(b"3", b"0x3"),
            good.replace(b'"max_tokens"', b"max_tokens"),
            good + good,
        ]
    )
    return post(gateway, random.choice(GENERATE), body)


def infer_binary(gateway, random):
    """Binary tensors to the infer endpoint: sizes, types, names or prefixes that do not fit."""
    model, name, kind, data = random.choice(
        [
            ("gpt_tokenize", "text", "BYTES", struct.pack("<I", 3) + b"abc"),
            ("gpt_detokenize", "ids", "INT32", struct.pack("<3i", 5, 6, 7)),
        ]
    )
    shape = [1] if kind == "BYTES" else [3]
    fault = random.randrange(10)
    size, length = len(data), None
    if fault == 0:
        kind = random.choice(["INT64", "FP32", "BOOL", "NO_SUCH", "", "int32", "FP64"])
    elif fault == 1:
        shape = random.choice([[2, 2], [], [4], [-1], [-3], [0, 1], [3, 1, 1], [1, 1], [65536]])
    elif fault == 2:
        size = random.choice([0, 1, len(data) - 1, len(data) + 1, 10**6, -1, 2**40, -(2**31)])
    elif fault == 3:
        name = random.choice(["", "absent", "text_input", "x" * 2000, "\0"])
    elif fault == 4:
        length = random.choice([1, 7, 10**6, -1, 2**63])
    elif fault == 5 and kind == "BYTES":
        data = struct.pack("<I", random.choice([0xFFFFFFFF, 100, 4, 0x7FFFFFFF])) + b"abc"
    elif fault == 6:
        data = data[: random.randrange(len(data))]
    elif fault == 7 and kind == "INT32":
        data = struct.pack("<3i", 5, random.choice([-1, 4096, 2**31 - 1, -(2**31)]), 7)
    elif fault == 8 and kind == "BYTES":
        data = struct.pack("<I", 3) + random.choice(
            [b"a\xff\xfe", b"\xed\xa0\x80", b"\xc3((", b"\x80ab"]
        )
    else:
        model = "gpt"  # decoupled: not served by this endpoint
    head = {
        "inputs": [
            {
                "name": name,
                "shape": shape,
                "datatype": kind,
                "parameters": {"binary_data_size": size},
            }
        ]
    }
    head = json.dumps(head).encode()
    headers = {"Inference-Header-Content-Length": str(len(head) if length is None else length)}
    return post(gateway, f"/v2/models/{model}/infer", head + data, headers)


def half_sent(gateway, random):
    """A truncated or meaningless request, after which the client closes or resets."""
    body = json.dumps({"text_input": "def ", "max_tokens": 3}).encode()
    head = f"POST {random.choice(GENERATE)} HTTP/1.1\r\nHost: x\r\n"
    length = f"Content-Length: {len(body)}\r\n\r\n"
    data = random.choice(
        [
            (head + length).encode()[: random.randrange(1, len(head + length))],
            (head + length).encode() + body[: random.randrange(len(body))],
            (head + f"Content-Length: {random.choice([-5, 'x', 10**7])}\r\n\r\n").encode() + body,
            (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + b"zz\r\n" + body,
            (head + "Transfer-Encoding: chunked\r\n\r\n40\r\n").encode() + body[:20],
            random.randbytes(random.randrange(1, 500)),
            b"GET\r\n\r\n",
            b"\r\n" * 50,
            (head + "A: " + "a" * 20_000).encode(),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ]
    )
    address = random.choice([gateway.http, gateway.http, gateway.grpc])
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
        try:
            connection.sendall(data)
            if random.random() < 0.5:  # a reset instead of a close
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # the server closed first
    return "closed"


def unknown_path(gateway, random):
    """Paths and methods that the server does not have."""
    path = random.choice(
        [
            "/", "/v1/models", "/v2/models/gpt/generat", "/v2/models//generate", "/v3/health/live",
            "/v2/models/absent/generate", "/v2/models/gpt/versions/9/generate", "/v2/models/gpt/9",
            "/v2/models/gpt/versions/x/infer", "/v2/health/dead", "/v2/models/%00/infer",
            "/v2/models/..%2f..%2fetc/infer", "/../../etc/passwd",
            "/v2/repository/models/absent/load",
            "/v2/systemsharedmemory/region/a/register", "/v2/cudasharedmemory/region/a/register",
            "/v2/models/" + "x" * 3000 + "/infer", "/v2/%ff%fe", "/v2/repository/models//load",
            f"/{random.randrange(10**9)}", "/v2/models/gpt/generate/again",
        ]
    )
    method = random.choice(["POST", "PUT", "DELETE", "PATCH", "BREW", "POST", "TRACE"])
    return post(gateway, path, random.choice([b"", b"{}", b"[", b'{"a": 1}']), method=method)


def post(gateway, path, body, headers=(), method="POST"):
    """The HTTP status of the answer; 400 for an error within a stream, whose status is 200."""
    connection = http.client.HTTPConnection(gateway.http, timeout=LIMIT)
    try:
        connection.request(method, path, body, {"Connection": "close", **dict(headers)})
        response = connection.getresponse()
        answer = response.read()
        if response.status == 200 and b'{"error"' in answer:
            return 400
        return response.status
    except (ConnectionError, http.client.HTTPException):
        return "closed"
    finally:
        connection.close()


def large(gateway, random):
    """A body of any size, beginning with valid JSON or not."""
    size = int(2 ** random.uniform(0, 26)) if random.random() < 0.05 else random.randrange(200_000)
    begin = random.choice([b'{"text_input": "a", "max_tokens": 0}', b"[", b'{"text_input": "', b""])
    fill = random.choice([b" ", b"a", b"[", b"\0", b"\xff"])
    body = (begin + fill * size)[: min(size, LARGEST)]
    return post(gateway, random.choice(GENERATE), body)


def absurd(gateway, random):
    """Shapes that fit no memory, integers beyond their type, a thousand tensors."""
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


def by_grpc(gateway, random):
    """Invalid messages, tensors that do not fit, closed calls; to both kinds of infer."""
    size, data = random.choice([(1, b"abc"), (2**31 - 1, b"abc"), (5, b"\xff\xfe"), (3, b"a" * 99)])
    request = service_pb2.ModelInferRequest(
        model_name=random.choice(["gpt_tokenize", "gpt_tokenize", "gpt", "absent", "", "../gpt"]),
        model_version=random.choice(["", "", "9", "x", "-1"]),
        raw_input_contents=random.choice([[], [struct.pack("<I", size) + data[:-1]], [b""] * 9]),
        inputs=[
            service_pb2.ModelInferRequest.InferInputTensor(
                name=random.choice(["text", "text_input", "", "\0"]),
                datatype=random.choice(["BYTES", "INT32", "", "X" * 1000]),
                shape=random.choice([[2], [-1], [2**62, 2**62], [0], [1] * 99, [2**40], []]),
            )
        ] * random.choice([0, 1, 1, 2, 50]),
    )
    if random.random() < 0.2:
        request.inputs.add(name="text").parameters["shared_memory_region"].string_param = "a"
    message = request.SerializeToString()
    if random.random() < 0.3:
        message = random.choice([random.randbytes(99), b"\xff" + message, bytes(3 << 20)])
    call = random.choice(
        ["ModelInfer", "ModelInfer", "ModelInfer", "RepositoryModelLoad", "LogSettings", "Nothing",
         "SystemSharedMemoryRegister", "TraceSetting", "CudaSharedMemoryRegister"]
    )
    with grpc.insecure_channel(gateway.grpc) as channel:
        try:
            if random.random() < 0.3:
                ask = channel.stream_stream(SERVICE + "ModelStreamInfer")
                for answer in ask(iter([message] * 3), timeout=LIMIT):
                    found = service_pb2.ModelStreamInferResponse.FromString(answer)
                    assert found.error_message or not found.infer_response.outputs
            else:
                channel.unary_unary(SERVICE + call)(message, timeout=LIMIT)
                return "answered"
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "late"
    return 400


KINDS = (
    by_grpc, generate_json, generate_text, infer_binary, half_sent, unknown_path, large, absurd,
)


def send(gateway, number):
    """Send malformed request `number`; return (kind, result)."""
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
