"""gpt: text in, text out; the model behind generate and generate_stream.

It gets the text's ids from gpt_tokenize by *BLS* (business logic scripting: a model calls another
model of its server) and the continuation from gpt_engine. The latter uses a Unix socket outside the
server (utils/serving/engine/socket_server.py), because BLS in 24.10 cannot cancel a request and can
hang when many streams run at once. So a client that leaves frees its slot, and a request whose
engine is killed gets an error at once.
"""

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

# The copy that the export put beside this file, whatever else is installed under this name.
sys.path.insert(0, str(Path(__file__).resolve().parent))
from utils.serving.engine import trace

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
NUMBERS = ("max_tokens", "temperature", "top_k", "top_p", "seed", "logprobs")
SAME = ("prompt_tokens", "weights_version")  # outputs passed on from the engine unchanged


class Refusal(Exception):
    """Ends a request: "CODE: why", with the name of a Triton error code."""


class TritonPythonModel:
    def initialize(self, args):
        setting = json.loads(args["model_config"])["parameters"]
        self.most = int(setting["requests"]["string_value"])
        limits = Path(__file__).with_name("limits.json")  # an older export wrote none
        self.text_bytes = json.loads(limits.read_text())["text_bytes"] if limits.exists() else 65536
        version = setting.get("weights_version", {"string_value": "0"})["string_value"]
        if not re.fullmatch(r"\d+", version):
            raise ValueError(f"weights_version {version!r} is not a version number; 0: the newest")
        self.version = int(version)
        self.calls = set()  # requests that have not ended
        self.ended = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    def execute(self, requests):
        """Gives each request a thread, which waits; their number is limited to bound memory."""
        for request in requests:
            call = Call(request)
            if len(self.calls) < self.most:
                self.calls.add(call)
                threading.Thread(target=self.answer, args=(call,), daemon=True).start()
            else:
                call.fail(f"UNAVAILABLE: {self.most} requests are here already, try again later")

    def answer(self, call):
        try:
            text = one(call.request, "text_input")
            if len(text) > self.text_bytes:  # before it costs anything
                size = f"text_input has {len(text)} bytes"
                raise Refusal(f"INVALID_ARG: {size}: give at most {self.text_bytes}")
            utf8("text_input", text)
            ids = self.tokens_of(text)
            silent = one(call.request, "exclude_input_in_output")
            self.generate(call, ids, b"" if silent else text)
        except Refusal as refusal:
            call.fail(str(refusal))
        except Exception as error:
            call.fail(f"INTERNAL: {error!r}")
        finally:
            self.calls.discard(call)

    def tokens_of(self, text):
        """Bytes -> int32 (tokens,), from gpt_tokenize."""
        response = pb_utils.InferenceRequest(
            model_name="gpt_tokenize",
            requested_output_names=["ids"],
            inputs=[pb_utils.Tensor("text", np.array([text], dtype=object))],
        ).exec()
        if not response.has_error():
            return pb_utils.get_output_tensor_by_name(response, "ids").as_numpy()
        message = response.error().message()
        named = re.match(r"[A-Z_]+: ", message)  # our models' errors begin with their code
        raise Refusal(message if named else f"UNAVAILABLE: {message}")

    def generate(self, call, ids, text):
        """Sends gpt_engine's output for the ids; `text` precedes the first of it."""
        request = call.request
        sampling = {name: number(one(request, name)) for name in NUMBERS}
        sampling = {name: given for name, given in sampling.items() if given is not None}
        sampling["stop"] = [utf8("stop", stop) for stop in values(request, "stop")]
        wanted = {
            "ids": ids.tolist(),
            "sampling": sampling,
            "prompt": utf8("prompt_name", one(request, "prompt_name") or b"") or None,
            "stream": bool(one(request, "stream")),
        }
        if call.span:
            wanted["traceparent"] = call.span.header()
        made = 0
        for line in self.engine_lines(call, json.dumps(wanted).encode() + b"\n"):
            answer = json.loads(line)
            if "error" in answer:
                raise Refusal(answer["error"])
            made += len(answer["ids"])
            outputs = {
                "text_output": text + answer["text"].encode(),
                "finish_reason": answer["finish"] or "",
                "completion_tokens": made,
            }
            # a version exported by an older workshop does not send these
            same = {name: answer[name] for name in SAME if name in answer}
            call.known = same | {"completion_tokens": made, "finish": answer["finish"]}
            if "logprobs" in answer:
                outputs["logprobs"] = json.dumps(answer["logprobs"])
            call.send(outputs | same, final=bool(answer["finish"]))
            text = b""
            if answer["finish"]:
                return
        if call.gone:
            raise Refusal("CANCELLED: the client has left")
        which = f"gpt_engine {self.version or ''}".rstrip()
        raise Refusal(f"UNAVAILABLE: {which} has died or is not loaded, try again later")

    def engine_lines(self, call, wanted):
        """gpt_engine's answer, one line per chunk; ends early if the engine dies."""
        pauses = (0, 0.05, 0.1)
        for file in (file for pause in pauses for file in engine_sockets(self.version, pause)):
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(str(file))
                    call.enter(connection)
                    connection.sendall(wanted)
                    lines = connection.makefile("rb")
                    first = lines.readline()
                    if first or call.gone:
                        yield from (x for x in itertools.chain([first], lines) if x[-1:] == b"\n")
                        return
                except OSError:  # no engine behind it, or no longer: look for another socket
                    continue

    def watch(self):
        """Checks for clients that left."""
        while not self.ended.wait(0.05):
            for call in list(self.calls):
                call.look()

    def finalize(self):
        self.ended.set()  # a running thread would delay the server's exit
        self.watcher.join()


class Call:
    """A request and its response sender.

    After its last response a request must not be touched: `is_cancelled` would crash the whole
    server with a segmentation fault (seen in 24.10). Hence the lock.
    """

    def __init__(self, request):
        self.request, self.sender = request, request.get_response_sender()
        self.open, self.begun, self.gone = True, False, False
        self.lock, self.connection = threading.Lock(), None
        self.came, self.known = time.time_ns(), {}  # known: attributes for its trace
        caller = trace.of_request(request)
        self.span = caller and caller.child()

    def send(self, outputs, final):
        """Sends a response. outputs: {name: its single value, an int, a str or bytes}."""
        response = pb_utils.InferenceResponse([tensor(*item) for item in outputs.items()])
        alone = final and not self.begun  # the only response
        self.begun = True
        self._send(response, final=alone)
        if final and not alone:  # after others, send the flag separately: 24.10's HTTP front end
            self._send(final=True)  # sometimes leaves a stream open that ends with text

    def fail(self, message):
        """Sends the last response: an error, whose message begins with the name of its code."""
        code = getattr(pb_utils.TritonError, message.split(":")[0])
        self.known["error"] = message
        self._send(pb_utils.InferenceResponse([], pb_utils.TritonError(message, code)), final=True)

    def _send(self, *response, final):
        with self.lock:
            if self.open:
                self.open = not final
                self.sender.send(*response, flags=FINAL if final else 0)
                if final and self.span:
                    trace.write("gpt", self.span, self.came, time.time_ns(), **self.known)

    def enter(self, connection):
        """Records that the engine behind `connection` serves this request."""
        with self.lock:
            self.connection = connection

    def look(self):
        """If the client is gone, closes the connection, so that the engine notices too."""
        with self.lock:
            if self.open and not self.gone and self.request.is_cancelled():
                self.gone = True
            if self.gone and self.connection is not None:
                with contextlib.suppress(OSError):  # already closed
                    self.connection.shutdown(socket.SHUT_RDWR)


def engine_sockets(version=0, pause=0.0):
    """The sockets of gpt_engine, of one version or of all (0), newest first; a killed engine leaves
    its socket behind."""
    time.sleep(pause)
    folder = Path(tempfile.gettempdir(), f"kintsugi-{os.getuid()}-{os.getppid()}")
    found = [(int(file.stem.split("-")[1]), age(file), file) for file in folder.glob("*-*-*.sock")]
    return [file for of, _, file in sorted(found, reverse=True) if version in (0, of)]


def age(file):
    """When a socket was created; 0.0 if it has just been removed."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def values(request, name):
    """The values of an input; empty if it is not given."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else tensor.as_numpy().reshape(-1)


def one(request, name):
    """The single value of an input; None if it is not given."""
    return next(iter(values(request, name)), None)


def tensor(name, value):
    """An output of one element."""
    value = value.encode() if isinstance(value, str) else value
    kind = np.int32 if isinstance(value, int) else object
    return pb_utils.Tensor(name, np.array([value], dtype=kind))


def number(value):
    """A numpy number as Python's: 0.7 arrived as FP32, 0.699999988, whose shortest form is 0.7."""
    return (
        float(str(value))
        if isinstance(value, np.floating)
        else value
        if value is None
        else value.item()
    )


def utf8(name, value):
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        why = f"{name} is not UTF-8: {error.reason} at byte {error.start}"
        raise Refusal(f"INVALID_ARG: {why}") from None
