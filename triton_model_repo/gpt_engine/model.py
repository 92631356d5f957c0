"""gpt_engine: token ids in, token ids out, while they are made (a *decoupled* model).

One instance of this model is one engine (utils/serving/engine/): this process leads, and the
ranks, one process each, hold a shard of the weights and follow. `execute` hands a request to the
engine and returns at once; the engine puts it into its running batch, and a thread sends what comes
out. So requests of many clients are in one batch at different places of their texts, which Triton's
own dynamic batcher cannot do: it joins requests only before they begin and parts them only at the
end.

Errors carry Triton's code and begin with its name, because HTTP shows clients the text alone:
INVALID_ARG for what the client should change, UNAVAILABLE for what may work a little later.

The export copies this file into each version of the model, and the engine with it.
"""

import json
import math
import os
import queue
import re
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

# The engine of this very version, whatever else is installed under this name.
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
# inputs that are one number each
NUMBERS = ("max_tokens", "temperature", "top_k", "top_p", "seed", "logprobs")
COUNTERS = {  # of Engine.stats() -> what Prometheus reads at /metrics, after "kintsugi_"
    # in this order: who reads so many tokens reads the steps that made them
    "steps_total": ("steps_total", "Steps of the model, of one token or a chunk of a prompt."),
    "tokens_total": ("tokens_total", "Tokens generated."),
    "prompt_tokens_total": ("prompt_tokens_total", "Positions of prompts."),
    "prefix_cache_hits_total": (
        "prefix_cache_hits_total",
        "Positions of prompts that were in the cache.",
    ),
    "preemptions_total": (
        "preemptions_total",
        "Times that a request gave its blocks of the KV cache to an older one, to be read again.",
    ),
    "requests_total": ("requests_total", "Requests accepted."),
    "requests_failed": ("requests_failed_total", "Requests that ended in an error."),
    "requests_cancelled": ("requests_cancelled_total", "Requests that their client left."),
    "requests_rejected": ("requests_rejected_total", "Requests refused: the queue was full."),
    "restarts": ("rank_restarts_total", "Times that the ranks were started anew."),
}
HISTOGRAMS = {
    "request_queue_time": "Seconds until a request has a slot.",
    "time_to_first_token": "Seconds from a request to its first token.",
    "inter_token_latency": "Seconds from a token to the next one of its request.",
    "e2e_request_latency": "Seconds from a request to the end of its answer.",
}
GAUGES = {
    "tokens_per_second": ("tokens_per_second", "Tokens a second, of late."),
    "time_to_first_token_last": ("time_to_first_token", "Seconds to the first token, lately."),
    "occupancy": ("batch_occupancy", "Rows of the last step that carried a request, 0 to 1."),
    "kv_use": ("kv_use", "Share of the KV cache's blocks in use, 0 to 1."),
    "kv_used": ("kv_blocks_used", "Blocks of the KV cache in use, of 16 positions each."),
    "kv_size": ("kv_blocks", "Blocks that the KV cache has."),
    "running": ("requests_running", "Requests in the batch."),
    "waiting": ("queue_waiting", "Requests that wait for a slot."),
    "ready": ("ready", "1 while the ranks are up."),
}


class TritonPythonModel:
    def initialize(self, args):
        """Starts the ranks and waits for them; what it raises is why Triton refuses the version."""
        config = json.loads(args["model_config"])
        setting = {name: value["string_value"] for name, value in config["parameters"].items()}
        options = EngineConfig.of_parameters(setting, f"{args['model_name']}/config.pbtxt")
        version = Path(args["model_repository"], args["model_version"])
        self.engine, self.pace = Engine(version, **asdict(options)), options.pace
        folder, name = folder_of(os.getppid()), f"gpt_engine-{args['model_version']}"
        # `gpt` comes this way
        self.socket_server = SocketServer(self.engine, folder, name, self.pace)
        self.calls = set()  # direct requests that are not over, to see when their client leaves
        self.metrics = Metrics({"model": args["model_name"], "version": args["model_version"]})
        self.news = queue.SimpleQueue()  # the ranks are down (False), or up again (True)
        self.engine.on_ready = self.news.put
        self.ended = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    def execute(self, requests):
        """Takes requests in; never waits. Whatever happens, each gets a last response."""
        for request in requests:
            call = Call(request)
            try:
                self.accept(call)
            except Exception as error:
                call.fail(error)

    def accept(self, call):
        name = string(call.request, "cancel")
        if name is not None:  # a request that ends another one
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
        """Sends what the engine makes of one request; chunks grow while it sends or sleeps."""
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
                if not piece.finish:  # every send costs three processes a wake-up
                    time.sleep(self.pace)
        except Exception as error:
            stream.cancel()
            call.fail(error)
        finally:
            self.calls.discard((call, stream))

    def watch(self):
        """Clients that left, readiness, metrics: all that has no request to begin it."""
        tell = 0.0
        while not self.ended.wait(0.05):
            for call, stream in list(self.calls):
                if call.left():
                    stream.cancel()
            self.socket_server.watch()
            while not self.news.empty():
                show_ready(self.news.get())
            if time.monotonic() > tell:
                self.metrics.tell(self.engine, gauges=not self.socket_server.superseded())
                tell = time.monotonic() + 0.2

    def is_ready(self):
        """Newer servers ask this at /v2/models/gpt_engine/ready; older ones say 200 regardless."""
        return bool(self.engine.stats()["ready"])

    def finalize(self):
        """Triton calls this when no request is in flight, on SIGTERM or after a newer version."""
        self.engine.on_ready = None
        gauges = not self.socket_server.superseded()  # else they are the newer instance's
        self.socket_server.close()  # Triton does not know of those requests: they end here
        self.ended.set()  # a thread that goes on would hold up the server's exit
        self.watcher.join()
        self.metrics.tell(self.engine, gauges)
        if gauges:
            self.metrics.leave()
        self.engine.close()


class Call:
    """A request and its way back.

    After its last response a request must not be touched: `is_cancelled` would end the whole
    server with a segmentation fault (seen in 24.10). Hence the lock.
    """

    def __init__(self, request):
        self.request, self.sender = request, request.get_response_sender()
        self.open, self.lock = True, threading.Lock()

    def send(self, piece, others, final):
        """A response with new tokens and their text, which Triton brings to the client; others:
        {output: array}."""
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
        """The last response: an error with its code."""
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
        """Whether the client has gone, or called the request off."""
        with self.lock:
            return self.open and self.request.is_cancelled()


class Metrics:
    """What the engine counts, as custom metrics at Triton's /metrics.

    A histogram is the counters that Prometheus makes of one, NAME_seconds_bucket, _sum and _count,
    because 24.10 has no other metrics than counters and gauges: `histogram_quantile` works on them.
    """

    def __init__(self, labels):
        self.labels, self.families, self.metrics, self.told = labels, {}, {}, {}

    def tell(self, engine, gauges=True):
        """gauges: False where a newer instance of the same version tells the same ones."""
        stats = engine.stats()
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
        # last: who sees the engine at rest finds all counted that it has done
        for key, (name, description) in GAUGES.items() if gauges else ():
            self.metric(name, description, "GAUGE").set(float(stats[key]))

    def leave(self):
        """Gauges of a version that ends are 0. They stay: where this version is loaded again, the
        new instance has the same ones, and the server may not survive if they are removed."""
        for name, description in GAUGES.values():
            self.metric(name, description, "GAUGE").set(0.0)

    def count(self, name, description, value, **labels):
        """Brings a counter, which takes only what is new, to this value."""
        key = (name, *labels.values())
        metric = self.metric(name, description, "COUNTER", **labels)
        if new := float(value) - self.told.get(key, 0.0):
            metric.increment(new)
            self.told[key] = float(value)

    def metric(self, name, description, kind, **labels):
        key = (name, *labels.values())
        if key not in self.metrics:
            if name not in self.families:  # both must live on
                kind = getattr(pb_utils.MetricFamily, kind)
                self.families[name] = pb_utils.MetricFamily(f"kintsugi_{name}", description, kind)
            self.metrics[key] = self.families[name].Metric(labels=self.labels | labels)
        return self.metrics[key]


def text_array(text):
    """An output of one text."""
    return np.array([text.encode()], dtype=object)


def number(request, name):
    """The one value of an optional input, as a Python number; None where it is not given."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    value = tensor.as_numpy().reshape(-1)[0]
    # the client's 0.7 came as FP32, 0.699999988...: the shortest number that is written so is 0.7
    return float(str(value)) if isinstance(value, np.floating) else value.item()


def strings(request, name):
    """The values of an optional BYTES input. Raises BadRequest for what is no UTF-8."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    try:
        return [] if tensor is None else [value.decode() for value in tensor.as_numpy().reshape(-1)]
    except UnicodeDecodeError as error:
        raise BadRequest(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None


def string(request, name):
    return next(iter(strings(request, name)), None)


def show_ready(ready):
    """`gpt` shows load balancers whether the ranks are up: unloaded while they are down.

    The model's own readiness cannot be switched in 24.10 (is_ready above came later), and only a
    server in explicit mode lets a model load another one: elsewhere the call ends the server.
    """
    server = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().replace(b"\0", b" ")
    if not re.search(rb"--model-control-mode[= ]explicit", server):
        return
    try:
        if ready:
            pb_utils.load_model("gpt")
        else:
            pb_utils.unload_model("gpt")
    except Exception as error:
        pb_utils.Logger.log_warn(f"gpt_engine could not switch gpt's readiness: {error}")
