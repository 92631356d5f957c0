"""Malformed requests by the thousand: each of KINDS is a function that sends a server one.

    for kind in KINDS:
        status = kind(server, random.Random("7"))       # the same seed makes the same request

Each is malformed for certain, so no answer to one may be a success. What comes back is an HTTP
status, the name of a gRPC status, or "closed" where the connection ended without an answer.

Not among them: an HTTP `shape` of a product as absurd as [1, 2**40], which ends version 2.51 of
Triton (a known fault of the server, before any model is asked), and numbers in JSON beyond the type
of their input, of which that version takes the lowest bits.
"""

import http.client
import json
import socket
import struct

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

LIMIT = 60.0  # seconds that a single request may take
GENERATE = ("/v2/models/gpt/generate", "/v2/models/gpt/generate_stream")


def generate_json(server, random):
    """A good JSON request of which one field is nonsense, to both endpoints."""
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
            ("prompt_name", ["nobody", "../1", "\0", "x" * 3000, 5, {}, ["a", "b"]]),
            ("stream", ["yes", {}, [], [True, False], 7]),
            ("exclude_input_in_output", ["no", {}, [], [True, False], -3]),
        ]
    )
    body = {**good, name: random.choice(values)}
    return post(server, random.choice(GENERATE), json.dumps(body).encode())


def generate_text(server, random):
    """What is no JSON object: cut short, bytes that are no text, deep, empty, of another kind."""
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
    return post(server, random.choice(GENERATE), body)


def infer_binary(server, random):
    """The infer endpoint with tensors as bytes: sizes, types, names, prefixes that do not fit."""
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
        name = random.choice(["", "nobody", "text_input", "x" * 2000, "\0"])
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
        model = "gpt"  # decoupled: not by this endpoint
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
    return post(server, f"/v2/models/{model}/infer", head + data, headers)


def grpc_infer(server, random):
    """Protobuf messages whose tensors do not fit their contents, or the model."""
    request = service_pb2.ModelInferRequest(model_name="gpt_detokenize")
    tensor = request.inputs.add(name="ids", datatype="INT32", shape=[3])
    data = struct.pack("<3i", 5, 6, 7)
    fault = random.randrange(9)
    if fault == 0:
        tensor.datatype = random.choice(["INT64", "FP32", "BYTES", "", "NO_SUCH", "BOOL"])
    elif fault == 1:
        shape = random.choice([[], [2], [4], [-1], [1, 3], [2**40], [-(2**62)], [2**62, 4], [0]])
        tensor.ClearField("shape")
        tensor.shape.extend(shape)
    elif fault == 2:
        data = random.randbytes(random.choice([0, 1, 11, 13, 4096]))
    elif fault == 3:
        request.model_name = random.choice(["", "nobody", "gpt_engine/..", "gpt", "x" * 4000])
    elif fault == 4:
        request.model_version = random.choice(["9", "0", "one", "99999999999999999999"])
    elif fault == 5:
        tensor.name = random.choice(["", "nobody", "IDS", "x" * 4000])
    elif fault == 6:
        request.inputs.add(name="ids", datatype="INT32", shape=[3])
    elif fault == 7:
        data = struct.pack("<3i", 5, random.choice([-1, 4096, 2**31 - 1, -(2**31)]), 7)
    else:
        request.outputs.add(name=random.choice(["", "nobody", "ids"]))
    request.raw_input_contents.append(data)
    if random.random() < 0.1:
        request.raw_input_contents.append(data)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            stub.ModelInfer(request, timeout=LIMIT)
        except grpc.RpcError as error:
            return error.code().name
    return 200


def grpc_bytes(server, random):
    """Bytes that are no protobuf message, and calls that the service does not have."""
    method = random.choice(["ModelInfer", "ModelStreamInfer", "ModelReady", "NoSuchCall", ""])
    data = b"\x0a\xff\xff\xff\x7f" + random.randbytes(random.randrange(300))  # too short by far
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        try:
            answer = call(data, timeout=LIMIT)
        except grpc.RpcError as error:
            return error.code().name
    return "closed" if answer is None else 200  # a stream without an answer


def half_sent(server, random):
    """A request that ends too early, or is none: then the client goes, politely or not."""
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
    address = random.choice([server.http, server.http, server.grpc])
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
        try:
            connection.sendall(data)
            if random.random() < 0.5:  # a reset in place of a farewell
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # the server was faster
    return "closed"


def unknown_path(server, random):
    """Paths and methods that the server does not have."""
    path = random.choice(
        [
            "/", "/v1/models", "/v2/models/gpt/generat", "/v2/models//generate", "/v3/health/live",
            "/v2/models/nobody/generate", "/v2/models/gpt/versions/9/generate", "/v2/models/gpt/9",
            "/v2/models/gpt/versions/x/infer", "/v2/health/dead", "/v2/models/%00/infer",
            "/v2/models/..%2f..%2fetc/infer", "/../../etc/passwd",
            "/v2/repository/models/nobody/load",
            "/v2/systemsharedmemory/region/a/register", "/v2/cudasharedmemory/region/a/register",
            "/v2/models/" + "x" * 3000 + "/infer", "/v2/%ff%fe", "/v2/repository/models//load",
            f"/{random.randrange(10**9)}", "/v2/models/gpt/generate/again",
        ]
    )
    method = random.choice(["POST", "PUT", "DELETE", "PATCH", "BREW", "POST", "TRACE"])
    return post(server, path, random.choice([b"", b"{}", b"[", b'{"a": 1}']), method=method)


KINDS = (
    generate_json, generate_text, infer_binary, grpc_infer, grpc_bytes, half_sent, unknown_path,
)


def post(server, path, body, headers=(), method="POST"):
    """The HTTP status of the answer; of a stream's error, which comes under 200, too: 400."""
    connection = http.client.HTTPConnection(server.http, timeout=LIMIT)
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
