"""gpt_detokenize: token ids -> text, with the tokenizer.json beside this file.

For whole answers. A single token may be half of a character: a streaming client should use the text
that gpt_engine sends with the tokens, which holds such halves back.
"""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"], args["model_version"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.size = self.tokenizer.get_vocab_size()
        limits = folder / "limits.json"  # an older export wrote none
        self.most = json.loads(limits.read_text())["ids"] if limits.exists() else 65536

    def execute(self, requests):
        """One response per request, in order: an ordinary model, not a decoupled one."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        ids = pb_utils.get_input_tensor_by_name(request, "ids").as_numpy()
        if ids.size > self.most:
            return refusal(f"there are {ids.size} ids: give at most {self.most}")
        ids = ids.tolist()
        outside = [value for value in ids if not 0 <= value < self.size]
        if outside:
            return refusal(f"id {outside[0]} is not a token: ids are 0 to {self.size - 1}")
        text = self.tokenizer.decode(ids)  # without special tokens, such as "<|end|>"
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("text", np.array([text.encode()], dtype=object))]
        )


def refusal(why):
    """An error response."""
    error = pb_utils.TritonError(f"INVALID_ARG: {why}", pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse([], error)
