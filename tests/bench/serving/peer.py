"""transformers.generate in a process of its own: what the bench compares the engine with.

    peer = Peer(folder, threads=2)                  # a Hugging Face folder
    tokens, first = peer.generate([[5, 7], [3, 9]], max_tokens=32)     # one batch, greedy
    peer.threads                                    # of torch, as it says itself
    peer.close()

The process waits at a pipe, one line of JSON in and one out, so that it does nothing while others
are measured. fp32, greedy, and no end before max_tokens: the end token is not looked for. Prompts
of a batch have one length, so nothing is padded: the best case of a static batch.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from utils.imports import collector_at_rest
from utils.ranks.supervise import Child, ChildEnded, end


class Peer:
    """The process. Raises RuntimeError with its last words when it ends or does not answer."""

    def __init__(self, folder: Path | str, threads: int, seconds: float = 180.0):
        self._process = Child(
            [sys.executable, "-m", "tests.bench.serving.peer", str(folder), str(threads)],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        try:
            self.threads = self._answer(seconds)["threads"]
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, seconds: float = 300.0
    ) -> tuple[list[list[int]], float]:
        """(new tokens of each prompt, seconds until the first ones) of one batch."""
        question = {"prompts": prompts, "max_tokens": max_tokens}
        answer = self._answer(seconds, json.dumps(question).encode())
        return answer["tokens"], answer["first"]

    def close(self) -> None:
        """Ends the process: it ends by itself when its pipe closes, else it is killed."""
        end([self._process], 2.0)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _answer(self, seconds, question=None):
        try:
            if question is not None:
                self._process.write_line(question)
            return json.loads(self._process.answer(seconds))
        except ChildEnded:
            raise RuntimeError(f"transformers ended: {self._process.last_words()}") from None
        except TimeoutError:
            raise RuntimeError(f"transformers did not answer within {seconds:g} s") from None


def main(folder: str, threads: int) -> None:
    """The process: serves lines until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer
    with collector_at_rest():
        import torch
        from transformers import AutoModelForCausalLM
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # no early end

    class Clock:
        """Called before each new token is chosen: notes when the first one could be."""

        def __call__(self, tokens, scores):
            self.first = self.first or time.perf_counter()
            return scores

    def generate(prompts, max_tokens):
        clock, begin = Clock(), time.perf_counter()
        clock.first = None
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            found = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                max_new_tokens=max_tokens, pad_token_id=0, logits_processor=[clock],
            )  # fmt: skip
        return {"tokens": found[:, tokens.shape[1] :].tolist(), "first": clock.first - begin}

    print(json.dumps({"threads": torch.get_num_threads()}), file=answers, flush=True)  # ready
    for line in sys.stdin:
        print(json.dumps(generate(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
