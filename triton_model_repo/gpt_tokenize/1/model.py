"""gpt_tokenize: text -> token ids, by the tokenizer.json beside this file."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"], args["model_version"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def execute(self, requests):
        """One response per request, in their order: an ordinary model, not a decoupled one."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)[0]
        try:
            ids = self.tokenizer.encode(text.decode()).ids
        except UnicodeDecodeError as error:
            message = f"INVALID_ARG: text is not UTF-8: {error.reason} at byte {error.start}"
            error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse([], error)
        return pb_utils.InferenceResponse([pb_utils.Tensor("ids", np.array(ids, dtype=np.int32))])
