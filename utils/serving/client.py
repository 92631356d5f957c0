"""A client of the served model: text over HTTP, streamed text and tokens over HTTP and gRPC.

    client = Client(server)                       # or Client(http="host:8000", grpc="host:8001")
    client.generate("def ", max_tokens=20)        # the whole text
    for piece in client.stream("def "): …         # chunks of text as they arrive (HTTP, SSE)
    async for piece in client.astream("def "): …  # the same over gRPC; leaving the loop cancels
    for ids in client.tokens([17, 4, 99]): …      # token ids in and out, over gRPC

Parameters, all optional: max_tokens, temperature (0: greedy), top_k, top_p, seed, stop (one text or
several), prompt_name, logprobs, exclude_input_in_output. The server checks their values; the client
checks only their names, because Triton ignores a misspelled one. Every failure is a ServeError with
the server's message. A stream that is left early is cancelled on the server. Threads may share a
client.

A gRPC stream is half-closed once its request is sent, and after an error it is read to its end:
cancelling a stream whose request has just ended leaves a stale request in Triton 2.51, on which the
server's shutdown then waits.
"""

import http.client
import json
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import closing
from typing import Any, Protocol

import numpy as np

SAMPLING = {
    "max_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "seed": "INT64",
    "stop": "BYTES",
    "prompt_name": "BYTES",
    "logprobs": "INT32",
}
TEXT = {**SAMPLING, "exclude_input_in_output": "BOOL"}
NUMPY = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}
NAME = re.compile(
    r"(UNKNOWN|INTERNAL|NOT_FOUND|INVALID_ARG|UNAVAILABLE|UNSUPPORTED|ALREADY_EXISTS|CANCELLED|"
    r"UNAUTHENTICATED|DEADLINE_EXCEEDED): "
)
BY_WORDS = {
    "is not found": "NOT_FOUND",
    "failed to poll from model repository": "NOT_FOUND",
    "has no available versions": "UNAVAILABLE",
}
BY_HTTP = {400: "INVALID_ARG", 404: "NOT_FOUND", 499: "CANCELLED", 503: "UNAVAILABLE"}
SAME = {"INVALID_ARGUMENT": "INVALID_ARG", "UNIMPLEMENTED": "UNSUPPORTED"}  # gRPC's names
LATE = "DEADLINE_EXCEEDED"


class ServeError(RuntimeError):
    """The server refused or failed, or did not answer.

    message   the server's message
    status    Triton's name of the error: INVALID_ARG, NOT_FOUND, UNAVAILABLE, CANCELLED, INTERNAL …
              or DEADLINE_EXCEEDED: the call's own time limit; NO_ANSWER: no server answers
    http      the HTTP status (200 in the middle of a stream, as Triton sends it), or None

    Triton does not send the client the name of a streaming model's error, so our models begin their
    messages with it: "UNAVAILABLE: the queue is full".
    """

    def __init__(self, message: str, status: str | None = None, http: int | None = None):
        super().__init__(message)
        self.message, self.http = message, http
        if word := NAME.match(message):
            self.status = word[1]
        else:
            known_words = [name for words, name in BY_WORDS.items() if message.endswith(words)]
            by_http = BY_HTTP.get(http, "INTERNAL")
            self.status = SAME.get(status, status) or (known_words or [by_http])[0]


class Addresses(Protocol):
    """The addresses, "host:port", that a TritonServer or its Gateway gives a client."""

    http: str
    grpc: str


class Client:
    """Talks to the models of a server.

    server    a TritonServer or Gateway; else give `http` and `grpc` as "host:port"
    timeout   seconds that one call may take in all; for a stream, until its end
    model     serves text;  engine: serves tokens
    """

    def __init__(
        self,
        server: Addresses | None = None,
        *,
        http: str | None = None,
        grpc: str | None = None,
        timeout: float = 120.0,
        model: str = "gpt",
        engine: str = "gpt_engine",
    ):
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout {timeout!r} is not a time limit: give seconds above 0")
        self.http = http or (server and server.http)
        self.grpc = grpc or (server and server.grpc)
        if not (self.http or self.grpc):
            raise ValueError('there is no address: give a server, or http="host:8000"')
        self.timeout, self.model, self.engine = timeout, model, engine

    # --- HTTP -----------------------------------------------------------------------------------

    def generate(self, text: str, **parameters: Any) -> str:
        """The complete text; it begins with the input unless exclude_input_in_output is set."""
        return self.answer(text, **parameters)["text_output"]

    def answer(self, text: str, **parameters: Any) -> dict:
        """The full response to `generate`: text_output, finish_reason, prompt_tokens,
        completion_tokens, weights_version, and logprobs (JSON text) if requested."""
        return next(self._post("generate", text, parameters, stream=False))

    def stream(self, text: str, **parameters: Any) -> Iterator[str]:
        """An iterator over chunks of the text, as they arrive (server-sent events)."""
        for event in self._post("generate_stream", text, parameters, stream=True):
            if event["text_output"]:
                yield event["text_output"]

    def _post(self, endpoint, text, parameters, stream):
        """The JSON objects of a response: one, or one for each event of a stream."""
        body = {"text_input": text, **known(parameters, TEXT), "stream": stream}
        until = time.monotonic() + self.timeout
        host, _, port = self.http.rpartition(":")
        # One connection per call, because Triton waits for open ones before it stops.
        connection = http.client.HTTPConnection(host, int(port), timeout=self.timeout)
        with closing(connection):
            try:
                connection.connect()
                socket = connection.sock
                headers = {"Connection": "close", "Content-Type": "application/json"}
                path = f"/v2/models/{self.model}/{endpoint}"
                connection.request("POST", path, json.dumps(body).encode(), headers)
                with connection.getresponse() as response:
                    status = response.status
                    lines = response if stream and status == 200 else [response.read()]
                    for line in lines:
                        if found := event_of(line, status):
                            yield found
                        socket.settimeout(max(until - time.monotonic(), 0.001))
            except TimeoutError:
                raise ServeError(f"no answer after {self.timeout:g} s", LATE) from None
            except (OSError, http.client.HTTPException) as error:
                raise ServeError(f"no answer from {self.http}: {error!r}", "NO_ANSWER") from None

    # --- gRPC -----------------------------------------------------------------------------------

    async def astream(self, text: str, **parameters: Any) -> AsyncIterator[str]:
        """An asynchronous iterator over chunks of the text, as they arrive."""
        from grpc import RpcError
        from tritonclient.grpc import aio

        values = {"text_input": text, **known(parameters, TEXT), "stream": True}
        types = {"text_input": "BYTES", **TEXT, "stream": "BOOL"}

        async def requests():
            yield {"model_name": self.model, "inputs": tensors(values, types)}

        async with aio.InferenceServerClient(self.grpc) as client:
            answers, failure = client.stream_infer(requests(), stream_timeout=self.timeout), None
            try:
                async for result, error in answers:
                    failure = failure or error
                    if not failure and (piece := text_of(result, "text_output")):
                        yield piece
                if failure:
                    raise rpc_error("", failure.message())
            except RpcError as error:
                raise rpc_error(error.code().name, error.details()) from None
            finally:
                answers.cancel()  # does nothing to a stream that has ended

    def tokens(
        self, ids: Iterable[int], *, request_id: str = "", version: str = "", **parameters: Any
    ) -> Iterator[list[int]]:
        """An iterator over lists of token ids, as they arrive, for a list of token ids.

        version   of the engine, such as "1"; "": the newest
        """
        values = {"input_ids": list(ids), **known(parameters, SAMPLING), "stream": True}
        types = {"input_ids": "INT32", **SAMPLING, "stream": "BOOL"}
        for result in self.infer(self.engine, tensors(values, types), request_id, version):
            found = result.as_numpy("output_ids")
            if found is not None and found.size:
                yield found.tolist()

    def infer(self, model: str, inputs: list, request_id: str = "", version: str = "") -> Iterator:
        """An iterator over the results of any model, as they arrive over gRPC.

        inputs    list of tritonclient's InferInput
        """
        import grpc
        from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

        request = service_pb2.ModelInferRequest(
            model_name=model, model_version=version, id=request_id
        )
        for tensor in inputs:
            request.inputs.append(tensor._get_tensor())
            request.raw_input_contents.append(tensor._get_content())
        failure = ""
        with grpc.insecure_channel(self.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answers = stub.ModelStreamInfer(iter([request]), timeout=self.timeout)
            try:
                for answer in answers:
                    failure = failure or answer.error_message
                    if not failure:
                        yield InferResult(answer.infer_response)
            except grpc.RpcError as error:
                raise rpc_error(error.code().name, error.details()) from None
            finally:
                answers.cancel()
        if failure:
            raise rpc_error("", failure)


def known(parameters: dict, names: Iterable[str]) -> dict:
    """The parameters that are not None. Raises TypeError for a name that the model lacks."""
    for name in parameters:
        if name not in names:
            raise TypeError(f"{name!r} is not a parameter of the model: it has {', '.join(names)}")
    return {name: value for name, value in parameters.items() if value is not None}


def event_of(line: bytes, status: int) -> dict | None:
    """One line of a response as an object; None for an empty line. Raises ServeError."""
    text = line.strip().removeprefix(b"data:").strip()
    if status != 200:
        raise ServeError(reason_of(text), http=status)
    if not text:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        raise ServeError(f"not a response of Triton: {text[:200]!r}", http=status) from None
    if "error" in found:
        raise ServeError(found["error"], http=status)
    return found


def reason_of(body: bytes) -> str:
    """The text of an error response: the value of {"error": …}, else the body itself."""
    body = body.strip().removeprefix(b"data:").strip()  # the one event of a stream
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


def tensors(values: dict, types: dict) -> list:
    """tritonclient's inputs for {name: a value or a list of values}."""
    from tritonclient.grpc import InferInput

    found = []
    for name, value in values.items():
        items = value if isinstance(value, list | tuple) else [value]
        if types[name] == "BYTES":
            items = [item.encode() if isinstance(item, str) else item for item in items]
            array = np.array(items, dtype=np.object_)
        else:
            array = np.array(items, dtype=NUMPY[types[name]])
        tensor = InferInput(name, array.shape, types[name])
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def text_of(result: Any, name: str) -> str:
    """The text in an output of one element; "" if the response has none."""
    array = result.as_numpy(name)
    return "" if array is None or not array.size else array.reshape(-1)[0].decode()


def rpc_error(status: str, message: str) -> ServeError:
    """A gRPC error; UNAVAILABLE from gRPC itself means that no server answers."""
    nobody = status == "UNAVAILABLE" and not NAME.match(message)
    return ServeError(message, "NO_ANSWER" if nobody else status or None)
