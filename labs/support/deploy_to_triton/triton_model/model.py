"""Given: the Triton model of the last section: requests in, a stream of tokens out.

Triton imports this file in a separate process, the *stub*, creates one TritonPythonModel per
instance, and calls `execute` with the requests that have arrived. Triton puts the version folder on
the path: it also holds lab 16's leader and ranks, your rank.py and scheduler.py, and `utils`.
"""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb
from leader import Leader, Request
from ranks import Ranks
from scheduler import step


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        tp, slots = (int(config["parameters"][key]["string_value"]) for key in ("tp", "slots"))
        folder = Path(__file__).resolve().parent
        positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
        self.model = Ranks(folder, tp, slots)
        self.leader = Leader(self.model, step, slots, positions)

    def execute(self, requests):
        for request in requests:
            answer = Answer(request)
            try:
                self.leader.submit(read(request, answer))
            except ValueError as error:
                answer.end(error)
        return None  # the senders send the responses later

    def finalize(self):
        self.leader.close()
        self.model.close()


class Answer:
    """The responses to one client. After the last one, its request must not be used."""

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
