"""Given: the Triton model of the exercises a, c and d: requests in, a stream of tokens out.

Triton imports this file in a process of its own, the *stub*, makes one TritonPythonModel for each
instance, and calls `execute` for whatever requests have come. Triton puts the version folder on the
path: the files beside it are its own, and the workshop's `utils` lies there too.

- one rank (no rank.py in the folder): the whole model, in this process
- rank.py is there: `tp` ranks, processes of their own; this process leads
- scheduler.py is there: your `step`; else one request after the other
"""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb
from leader import Leader, Request, alone


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        given = {key: value["string_value"] for key, value in config["parameters"].items()}
        folder = Path(__file__).resolve().parent
        slots = int(given.get("slots", 1))
        if (folder / "rank.py").exists():
            from ranks import Ranks

            self.model = Ranks(folder, int(given["tp"]), slots, float(given.get("seconds", 20)))
        else:
            import torch
            from model_shard import Shard

            torch.set_num_threads(1)
            self.model = Shard(folder, slots=slots, diary=folder / "diary-0")
        step = alone
        if (folder / "scheduler.py").exists():
            from scheduler import step
        positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
        self.leader = Leader(self.model, step, slots, positions)

    def execute(self, requests):
        for request in requests:
            answer = Answer(request)
            try:
                self.leader.submit(read(request, answer))
            except ValueError as error:
                answer.end(error)
        return None  # the responses go out by the senders, later

    def finalize(self):
        self.leader.close()
        self.model.close()


class Answer:
    """The way back to one client. After its last response a request must not be touched."""

    def __init__(self, request):
        self.request, self.sender, self.open = request, request.get_response_sender(), True

    def send(self, token):
        if self.open:
            tensor = pb.Tensor("output_ids", np.array([token], np.int32))
            self.sender.send(pb.InferenceResponse([tensor]))

    def end(self, error=None):
        """The last response: empty, or an error."""
        if not self.open:
            return
        self.open, final = False, pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if error is None:
            self.sender.send(flags=final)
            return
        bad = isinstance(error, ValueError)
        code = pb.TritonError.INVALID_ARG if bad else pb.TritonError.INTERNAL
        self.sender.send(pb.InferenceResponse(error=pb.TritonError(str(error), code)), final)

    def cancelled(self):
        return self.open and self.request.is_cancelled()


def read(request, answer):
    """The inputs of a request; raises ValueError."""
    tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    tokens = tensors["input_ids"].tolist()
    max_tokens = int(tensors["max_tokens"][0]) if "max_tokens" in tensors else 16
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: ask for at least 1")
    arrival = tensors["arrival"].tolist() if "arrival" in tensors else (1, 0)
    return Request(tokens, max_tokens, answer, arrival)
