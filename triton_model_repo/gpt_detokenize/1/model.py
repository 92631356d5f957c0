"""gpt_detokenize: token ids -> text, by the tokenizer.json beside this file.

For whole answers. A single token may be half of a character: who streams takes the text that
gpt_engine sends along, which holds such halves back.
"""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"], args["model_version"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.size = self.tokenizer.get_vocab_size()

    def execute(self, requests):
        """One response per request, in their order: an ordinary model, not a decoupled one."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        ids = pb_utils.get_input_tensor_by_name(request, "ids").as_numpy().tolist()
        outside = [value for value in ids if not 0 <= value < self.size]
        if outside:
            message = f"INVALID_ARG: id {outside[0]} is no token: ids go from 0 to {self.size - 1}"
            error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse([], error)
        text = self.tokenizer.decode(ids)  # without special tokens, as "<|end|>"
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("text", np.array([text.encode()], dtype=object))]
        )
