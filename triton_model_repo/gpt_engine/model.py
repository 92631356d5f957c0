"""gpt_engine: token ids in, token ids out, as they are generated (a *decoupled* model).

One instance of this model is one engine (utils/serving/engine/): this process leads, and the
ranks, one process each, hold a shard of the weights and follow. `execute` hands a request to the
engine and returns at once; the engine adds it to its running batch, and a thread sends the output.
So one batch holds requests of many clients at different positions in their texts, which Triton's
own dynamic batcher cannot do: it groups requests only before they start and separates them only at
the end.

Errors carry Triton's code and begin with its name, because HTTP shows clients only the text:
INVALID_ARG if the client must change the request, UNAVAILABLE if it may work later.

The export copies this file, with the engine, into each version of the model.
"""

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

# This version's own engine, whatever else is installed under this name.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from utils.serving.engine import trace
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.engine import Engine
from utils.serving.engine.request import BadRequest, Chunk, SamplingParams, Unavailable
from utils.serving.engine.socket_server import SocketServer, folder_of
from utils.serving.engine.stats import BOUNDS


class Cancelled(Exception):
    """The client, or a `cancel`, ended the request."""


FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CODES = (
    (BadRequest, "INVALID_ARG"), (Unavailable, "UNAVAILABLE"), (Cancelled, "CANCELLED"),
    (FloatingPointError, "INTERNAL"),
)
PINNED = re.compile(r'"weights_version"\s+value:?\s*\{\s*string_value:\s*"(\d+)"')
# inputs of a single number
NUMBERS = ("max_tokens", "temperature", "top_k", "top_p", "seed", "logprobs")
COUNTERS = {  # key in Engine.stats() -> name at /metrics, after "kintsugi_", and description
    # steps first: a reader that sees some tokens also sees the steps that generated them
    "steps_total": ("steps_total", "Steps of the model, of one token or a chunk of a prompt."),
    "tokens_total": ("tokens_total", "Tokens generated."),
    "prompt_tokens_total": ("prompt_tokens_total", "Prompt positions."),
    "prefix_cache_hits_total": (
        "prefix_cache_hits_total",
        "Prompt positions that were in the cache.",
    ),
    "preemptions_total": (
        "preemptions_total",
        "Times that a request lost its KV cache blocks to an older one and was read again.",
    ),
    "requests_total": ("requests_total", "Requests accepted."),
    "requests_failed": ("requests_failed_total", "Requests that ended in an error."),
    "requests_cancelled": ("requests_cancelled_total", "Requests cancelled by their client."),
    "requests_rejected": (
        "requests_rejected_total",
        "Requests refused: the queue was full or the ranks were down.",
    ),
    "restarts": ("rank_restarts_total", "Times that the ranks were restarted."),
}
HISTOGRAMS = {
    "request_queue_time": "Seconds until a request has a slot.",
    "time_to_first_token": "Seconds from a request to its first token.",
    "inter_token_latency": "Seconds from a token to the next one of its request.",
    "e2e_request_latency": "Seconds from a request to the end of its response.",
}
GAUGES = {
    "tokens_per_second": ("tokens_per_second", "Tokens per second over the last 5 seconds."),
    "time_to_first_token_last": (
        "time_to_first_token",
        "Seconds to the first token of the latest request.",
    ),
    "occupancy": ("batch_occupancy", "Rows of the last step that carried a request, 0 to 1."),
    "kv_use": ("kv_use", "Share of the KV cache's blocks in use, 0 to 1."),
    "kv_used": ("kv_blocks_used", "Blocks of the KV cache in use, of 16 positions each."),
    "kv_size": ("kv_blocks", "Blocks of the KV cache."),
    "running": ("requests_running", "Requests in the batch."),
    "waiting": ("queue_waiting", "Requests that wait for a slot."),
    "ready": ("ready", "1 while the ranks are up."),
    "answers": ("answers_gpt", "1 while the ranks are up and gpt's requests go to this version."),
}


class TritonPythonModel:
    def initialize(self, args):
        """Starts the ranks and waits for them; if it raises, Triton reports why and refuses the
        version."""
        config = json.loads(args["model_config"])
        setting = {name: value["string_value"] for name, value in config["parameters"].items()}
        options = EngineConfig.of_parameters(setting, f"{args['model_name']}/config.pbtxt")
        version = Path(args["model_repository"], args["model_version"])
        self.engine, self.pace = Engine(version, **asdict(options)), options.pace
        folder, name = folder_of(os.getppid()), f"gpt_engine-{args['model_version']}"
        # for requests from `gpt`
        self.socket_server = SocketServer(self.engine, folder, name, self.pace)
        self.calls = set()  # direct requests in flight, to detect clients that leave
        self.metrics = Metrics({"model": args["model_name"], "version": args["model_version"]})
        self.front = Path(args["model_repository"]).with_name("gpt") / "config.pbtxt"
        self.ended = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    def execute(self, requests):
        """Accepts requests without waiting. Whatever happens, each gets a last response."""
        for request in requests:
            call = Call(request)
            try:
                self.accept(call)
            except Exception as error:
                call.fail(error)

    def accept(self, call):
        name = string(call.request, "cancel")
        if name is not None:  # a request to cancel another one
            found = self.engine.cancel(name)
            call.send(Chunk([], "", "cancelled" if found else ""), {}, final=True)
            return
        sampling = {field: number(call.request, field) for field in NUMBERS}
        sampling = {field: value for field, value in sampling.items() if value is not None}
        ids = pb_utils.get_input_tensor_by_name(call.request, "input_ids")
        stream = self.engine.submit(
            [] if ids is None else ids.as_numpy().tolist(),
            SamplingParams(stop=tuple(strings(call.request, "stop")), **sampling),
            prompt=string(call.request, "prompt_name") or None,
            id=call.request.request_id() or None,
            context=trace.of_request(call.request),
        )
        threading.Thread(target=self.answer, args=(call, stream), daemon=True).start()

    def answer(self, call, stream):
        """Sends the engine's output for one request; chunks grow while it sends or sleeps."""
        try:
            self.calls.add((call, stream))
            same = {
                "prompt_tokens": np.array([stream.prompt_tokens], dtype=np.int32),
                "weights_version": text_array(self.engine.version.number),
            }
            pieces = stream if number(call.request, "stream") else [stream.result()]
            for piece in pieces:
                if piece.finish == "cancelled":
                    raise Cancelled("the request was cancelled")
                call.send(piece, same, final=bool(piece.finish))
                if not piece.finish:  # every send wakes up three processes
                    time.sleep(self.pace)
        except Exception as error:
            stream.cancel()
            call.fail(error)
        finally:
            self.calls.discard((call, stream))

    def watch(self):
        """Handles everything that no request triggers: clients that left, readiness, metrics."""
        tell, ready = 0.0, True
        while not self.ended.wait(0.05):
            for call, stream in list(self.calls):
                if call.left():
                    stream.cancel()
            self.socket_server.watch()
            if time.monotonic() > tell or self.engine.ready != ready:
                ready = self.engine.ready
                superseded = self.socket_server.superseded()
                answers = not superseded and self.answers_gpt()
                if answers:
                    self.show_ready(ready)
                self.metrics.tell(self.engine, answers, gauges=not superseded)
                tell = time.monotonic() + 0.2

    def answers_gpt(self):
        """Whether gpt's requests go to this version: it is pinned in gpt/config.pbtxt, or the
        newest one that runs (`engine_sockets` in gpt/1/model.py)."""
        with contextlib.suppress(OSError):
            if (pinned := PINNED.search(self.front.read_text())) and int(pinned[1]):
                return pinned[1] == self.engine.version.number
        sockets = self.socket_server.file.parent.glob("gpt_engine-*-*.sock")
        found = [file.stem.split("-") for file in sockets]
        running = [int(number) for _, number, pid in found if Path(f"/proc/{pid}").exists()]
        return int(self.engine.version.number) >= max(running, default=0)

    def show_ready(self, ready):
        """Shows load balancers whether the ranks are up: `gpt` is unloaded while they are down.

        The file tells another version, if gpt's requests go there next, to load `gpt` again.
        """
        unloaded = self.socket_server.file.with_name("gpt-unloaded")
        if ready and unloaded.exists():
            switch_gpt(True)
            unloaded.unlink(missing_ok=True)
        elif not ready and not unloaded.exists():
            unloaded.touch()
            switch_gpt(False)

    def is_ready(self):
        """Whether the ranks are up. Newer servers call this for /v2/models/gpt_engine/ready; older
        ones always answer 200."""
        return bool(self.engine.stats()["ready"])

    def finalize(self):
        """Ends the engine. Triton calls this when no request is in flight, on SIGTERM or after a
        newer version was loaded."""
        gauges = not self.socket_server.superseded()  # else they are the newer instance's
        self.socket_server.close()  # Triton does not know of these requests, so wait for them here
        self.ended.set()  # a running thread would delay the server's exit
        self.watcher.join()
        self.metrics.tell(self.engine, gauges=gauges)
        if gauges:
            self.metrics.leave()
        self.engine.close()


class Call:
    """A request and its response sender.

    After its last response a request must not be touched: `is_cancelled` would crash the whole
    server with a segmentation fault (seen in 24.10). Hence the lock.
    """

    def __init__(self, request):
        self.request, self.sender = request, request.get_response_sender()
        self.open, self.lock = True, threading.Lock()

    def send(self, piece, others, final):
        """Sends a response with new tokens and their text. others: {output: array}."""
        if piece.logprobs:
            others = others | {"logprobs": text_array(json.dumps(piece.logprobs))}
        outputs = {
            "output_ids": np.array(piece.tokens, dtype=np.int32),
            "text": text_array(piece.text),
            "finish_reason": text_array(piece.finish or ""),
        } | others
        tensors = [pb_utils.Tensor(name, values) for name, values in outputs.items()]
        self._send(pb_utils.InferenceResponse(tensors), final)

    def fail(self, error):
        """Sends the last response: an error with its code."""
        name = next((name for kind, name in CODES if isinstance(error, kind)), None)
        text, name = f"{name}: {error}" if name else f"INTERNAL: {error!r}", name or "INTERNAL"
        error = pb_utils.TritonError(text, getattr(pb_utils.TritonError, name))
        self._send(pb_utils.InferenceResponse([], error), final=True)

    def _send(self, response, final):
        with self.lock:
            if self.open:
                self.open = not final
                self.sender.send(response, flags=FINAL if final else 0)

    def left(self):
        """Whether the client is gone or has cancelled the request."""
        with self.lock:
            return self.open and self.request.is_cancelled()


class Metrics:
    """The engine's statistics as custom metrics at Triton's /metrics.

    A histogram is written as the counters that Prometheus would make of it, NAME_seconds_bucket,
    _sum and _count, because 24.10 has only counters and gauges: `histogram_quantile` works on them.
    """

    def __init__(self, labels):
        self.labels, self.families, self.metrics, self.told = labels, {}, {}, {}

    def tell(self, engine, answers=False, gauges=True):
        """Updates all metrics.

        answers   whether gpt's requests go to this version
        gauges    False if a newer instance of the version reports them
        """
        stats = engine.stats()
        stats["answers"] = answers and stats["ready"]
        stats["kv_use"] = stats["kv_used"] / stats["kv_size"]
        for key, (name, description) in COUNTERS.items():
            self.count(name, description, stats[key])
        for name, took in engine.histograms().items():
            name, description = f"{name}_seconds", HISTOGRAMS[name]
            for bound, count in zip(BOUNDS, took.counts):
                bound = "+Inf" if bound == math.inf else f"{bound:g}"
                self.count(f"{name}_bucket", description, count, le=bound)
            self.count(f"{name}_sum", description, took.sum)
            self.count(f"{name}_count", description, took.count)
        # last: a reader that sees an idle engine finds all of its work counted
        for key, (name, description) in GAUGES.items() if gauges else ():
            self.metric(name, description, "GAUGE").set(float(stats[key]))

    def leave(self):
        """Sets the gauges of a version that ends to 0. They are not removed: an instance that loads
        this version again has the same ones, and removing them may crash the server."""
        for name, description in GAUGES.values():
            self.metric(name, description, "GAUGE").set(0.0)

    def count(self, name, description, value, **labels):
        """Raises a counter, which accepts only increments, to this value."""
        key = (name, *labels.values())
        metric = self.metric(name, description, "COUNTER", **labels)
        if new := float(value) - self.told.get(key, 0.0):
            metric.increment(new)
            self.told[key] = float(value)

    def metric(self, name, description, kind, **labels):
        key = (name, *labels.values())
        if key not in self.metrics:
            if name not in self.families:  # both must be kept alive
                kind = getattr(pb_utils.MetricFamily, kind)
                self.families[name] = pb_utils.MetricFamily(f"kintsugi_{name}", description, kind)
            self.metrics[key] = self.families[name].Metric(labels=self.labels | labels)
        return self.metrics[key]


def text_array(text):
    """An output of a single text."""
    return np.array([text.encode()], dtype=object)


def number(request, name):
    """The single value of an optional input as a Python number; None if it is not given."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    value = tensor.as_numpy().reshape(-1)[0]
    # the client's 0.7 arrived as FP32, 0.699999988..., whose shortest form is 0.7
    return float(str(value)) if isinstance(value, np.floating) else value.item()


def strings(request, name):
    """The values of an optional BYTES input. Raises BadRequest for text that is not UTF-8."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    try:
        return [] if tensor is None else [value.decode() for value in tensor.as_numpy().reshape(-1)]
    except UnicodeDecodeError as error:
        raise BadRequest(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None


def string(request, name):
    return next(iter(strings(request, name)), None)


def switch_gpt(on):
    """Loads or unloads `gpt`.

    The model's own readiness cannot be switched in 24.10 (is_ready above came later), and only a
    server in explicit mode lets a model load another one: otherwise the call crashes the server.
    """
    server = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().replace(b"\0", b" ")
    if not re.search(rb"--model-control-mode[= ]explicit", server):
        return
    try:
        if on:
            pb_utils.load_model("gpt")
        else:
            pb_utils.unload_model("gpt")
    except Exception as error:
        pb_utils.Logger.log_warn(f"gpt_engine could not switch gpt's readiness: {error}")
