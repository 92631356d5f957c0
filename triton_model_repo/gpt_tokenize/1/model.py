"""gpt_tokenize: text -> token ids, with the tokenizer.json beside this file."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"], args["model_version"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        limits = folder / "limits.json"  # an older export wrote none
        self.most = json.loads(limits.read_text())["text_bytes"] if limits.exists() else 65536

    def execute(self, requests):
        """One response per request, in order: an ordinary model, not a decoupled one."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)[0]
        if len(text) > self.most:  # before it costs anything
            return refusal(f"text has {len(text)} bytes: give at most {self.most}")
        try:
            ids = self.tokenizer.encode(text.decode()).ids
        except UnicodeDecodeError as error:
            return refusal(f"text is not UTF-8: {error.reason} at byte {error.start}")
        return pb_utils.InferenceResponse([pb_utils.Tensor("ids", np.array(ids, dtype=np.int32))])


def refusal(why):
    """An error response."""
    error = pb_utils.TritonError(f"INVALID_ARG: {why}", pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse([], error)
