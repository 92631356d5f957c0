"""Small Python models for the tests of the server and the client, without weights or torch.

    repo = write_models(folder, "echo", "gpt")

echo      text -> the same text
slow      text -> the same text after that many seconds; it first creates `began` in its folder
gpt       has the served model's interface: it answers with the words of the input, 50 ms
          each; the word "fail" is an error; kintsugi_cancelled_total counts clients that left
gpt_engine   token ids -> the same ids, one at a time; a negative one is an error
hopeless  never loads;   sleeper  takes a minute to load
litter    starts a process in its own session and never ends it
"""

import textwrap
import time
from pathlib import Path

from tests.serving.processes import until
from utils.serving import metrics

TEXT = """
    input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
    output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
SAMPLING = """
    { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
    { name: "temperature" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
    { name: "top_k" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
    { name: "top_p" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
    { name: "seed" data_type: TYPE_INT64 dims: [ 1 ] optional: true },
    { name: "stop" data_type: TYPE_STRING dims: [ -1 ] optional: true },
    { name: "prompt_name" data_type: TYPE_STRING dims: [ 1 ] optional: true },
    { name: "logprobs" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
    { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
CONFIGS = {
    "echo": TEXT,
    "slow": TEXT,
    "hopeless": TEXT,
    "sleeper": TEXT,
    "litter": TEXT,
    "gpt": f"""
    {DECOUPLED}
    input [
    {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
    {{ name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
    {SAMPLING} ]
    output [ {{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }},
             {{ name: "finish_reason" data_type: TYPE_STRING dims: [ 1 ] }} ]
    """,
    "gpt_engine": f"""
    {DECOUPLED}
    input [ {{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] }}, {SAMPLING} ]
    output [ {{ name: "output_ids" data_type: TYPE_INT32 dims: [ -1 ] }} ]
    """,
}
HEAD = """
    import subprocess, threading, time
    import numpy as np
    import triton_python_backend_utils as pb

    def text_of(request):
        return pb.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()

    def given(request, name, default):
        tensor = pb.get_input_tensor_by_name(request, name)
        return default if tensor is None else tensor.as_numpy().tolist()

    def strings(name, text):
        return pb.Tensor(name, np.array([text.encode()], dtype=np.object_))

    class TritonPythonModel:
"""
CODE = {
    "echo": """
        def execute(self, requests):
            return [pb.InferenceResponse([strings("text_output", text_of(r))]) for r in requests]
    """,
    "slow": """
        def initialize(self, args):
            self.folder = args["model_repository"]

        def execute(self, requests):
            open(self.folder + "/began", "w").close()
            time.sleep(sum(float(text_of(request)) for request in requests))
            return [pb.InferenceResponse([strings("text_output", text_of(r))]) for r in requests]
    """,
    "hopeless": """
        def initialize(self, args):
            raise ValueError("rank-1-of-2.safetensors is cut short: export it again")
    """,
    "sleeper": """
        def initialize(self, args):
            time.sleep(60)
    """,
    "litter": """
        def initialize(self, args):
            subprocess.Popen(["sleep", "600"], start_new_session=True)
    """,
    "gpt": """
        def initialize(self, args):
            kind = pb.MetricFamily.COUNTER
            # two threads that touch metrics at the same time end the whole server (2.51)
            self.lock = threading.Lock()
            self.family = pb.MetricFamily("kintsugi_cancelled_total", "requests left early", kind)
            self.cancelled = self.family.Metric(labels={"model": "gpt", "version": "1"})
            self.words = pb.MetricFamily("kintsugi_words_total", "words sent", kind)
            self.sent = self.words.Metric(labels={"model": "gpt", "version": "1"})

        def execute(self, requests):
            for request in requests:
                threading.Thread(target=self.answer, args=(request,)).start()

        def answer(self, request):
            sender, final = request.get_response_sender(), pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            try:
                self.send_all(request, sender)
            except ValueError as error:
                failure = pb.InferenceResponse(error=pb.TritonError(str(error), error.code))
                sender.send(failure, flags=final)
            else:
                sender.send(flags=final)

        def send_all(self, request, sender):
            words = text_of(request).split()
            limit = given(request, "max_tokens", [64])[0]
            if limit < 1:
                raise refused("INVALID_ARG: max_tokens is not at least 1", "INVALID_ARG")
            words = words[:limit]
            pieces = [word + " " for word in words]
            if not given(request, "stream", [False])[0]:
                pieces = ["".join(pieces)]
            for piece in pieces:
                if request.is_cancelled():
                    with self.lock:
                        self.cancelled.increment(1)
                    raise refused("CANCELLED: the client has gone", "CANCELLED")
                time.sleep(0.05)
                if "fail" in piece:
                    raise refused("UNAVAILABLE: a rank has died", "UNAVAILABLE")
                out = [strings("text_output", piece), strings("finish_reason", "length")]
                sender.send(pb.InferenceResponse(out))
                with self.lock:
                    self.sent.increment(1)

    def refused(text, code):
        error = ValueError(text)
        error.code = getattr(pb.TritonError, code)
        return error
    """,
    "gpt_engine": """
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                for number in pb.get_input_tensor_by_name(request, "input_ids").as_numpy():
                    if number < 0:  # an error must be the last response, or the server may crash
                        code = pb.TritonError.UNAVAILABLE
                        error = pb.TritonError("UNAVAILABLE: a rank has died", code)
                        final = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                        sender.send(pb.InferenceResponse(error=error), flags=final)
                        break
                    out = pb.Tensor("output_ids", np.array([number], dtype=np.int32))
                    sender.send(pb.InferenceResponse([out]))
                else:
                    sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """,
}


def write_models(folder, *names) -> Path:
    """A model repository with these models, each in version 1."""
    for name in names:
        (Path(folder) / name / "1").mkdir(parents=True)
        config = f'name: "{name}"\nbackend: "python"\nmax_batch_size: 0\n'
        config += textwrap.dedent(CONFIGS[name])
        config += "instance_group [ { kind: KIND_MODEL count: 1 } ]\n"
        (Path(folder) / name / "config.pbtxt").write_text(config)
        write_code(folder, name)
    return Path(folder)


def write_code(folder, name, version=1, like=None):
    """Write a version's model.py with the code of the model `like`."""
    path = Path(folder) / name / str(version)
    path.mkdir(exist_ok=True)
    (path / "model.py").write_text(textwrap.dedent(HEAD + CODE[like or name]))


# ---- their metrics


def gone(server):
    """How many requests have been cancelled so far."""
    return metrics.scrape(server)["cancelled_total"]


def settled_gone(server):
    return settled(server)["cancelled_total"]


def settled(server):
    """Our metrics once no other test's request is in flight: a word takes 50 ms."""

    def twice():
        first = metrics.scrape(server)
        time.sleep(0.3)
        return [first] if first.equals(metrics.scrape(server)) else None

    return until(twice)[0]
