"""Other programs that generate, each in its own process, to compare the engine with.

    peer = Peer(folder, threads=2)                  # transformers, on a Hugging Face folder
    peer = Peer(folder, 2, "ctranslate2")           # the same model in C++, where it is installed
    peer = Peer(folder, 2, "ctranslate2 int8")      # and in its 8 bits
    tokens, first = peer.generate([[5, 7], [3, 9]], max_tokens=32)     # one batch, greedy
    peer.threads                                    # the number in use
    peer.close()

The process waits at a pipe, one line of JSON in and one out, so that it is idle while others are
measured. It generates greedily, in fp32 by default, and ignores the end token: max_tokens each.
Prompts of a batch have equal lengths, so nothing is padded: the best case of a static batch.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from utils.imports import collector_at_rest
from utils.ranks.supervise import Child, ChildEnded, end


class Peer:
    """The process. Raises RuntimeError with its last words when it ends or does not answer."""

    def __init__(
        self,
        folder: Path | str,
        threads: int,
        library: str = "transformers",
        seconds: float = 180.0,
    ):
        self.library = library
        self._process = Child(
            [sys.executable, "-m", "tests.bench.serving.peer", str(folder), str(threads), library],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        try:
            self.threads = self._answer(seconds)["threads"]
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, seconds: float = 300.0
    ) -> tuple[list[list[int]], float | None]:
        """Return (new tokens of each prompt, seconds until the first ones) of one batch; the latter
        are None for CTranslate2, which does not report them."""
        question = {"prompts": prompts, "max_tokens": max_tokens}
        answer = self._answer(seconds, json.dumps(question).encode())
        return answer["tokens"], answer["first"]

    def close(self) -> None:
        """End the process by closing its pipe; kill it if it does not exit."""
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
            raise RuntimeError(f"{self.library} ended: {self._process.last_words()}") from None
        except TimeoutError:
            raise RuntimeError(f"{self.library} did not answer within {seconds:g} s") from None


def main(folder: str, threads: int, library: str) -> None:
    """Serve lines until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep what libraries print out of the answers
    library, _, numbers = library.partition(" ")
    if library == "transformers":
        threads, generate = with_transformers(folder, threads)
    else:
        threads, generate = with_ctranslate2(folder, threads, numbers or "float32")
    print(json.dumps({"threads": threads}), file=answers, flush=True)  # ready
    for line in sys.stdin:
        tokens, first = generate(**json.loads(line))
        print(json.dumps({"tokens": tokens, "first": first}), file=answers, flush=True)


def with_transformers(folder: str, threads: int) -> tuple[int, Callable]:
    """Return (torch's threads, a function that generates a batch with transformers)."""
    with collector_at_rest():
        import torch
        from transformers import AutoModelForCausalLM
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # no early end

    class Clock:
        """Record when the first token can be chosen; called before each choice."""

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
            )
        return found[:, tokens.shape[1] :].tolist(), clock.first - begin

    return torch.get_num_threads(), generate


def with_ctranslate2(folder: str, threads: int, compute_type: str) -> tuple[int, Callable]:
    """Return (threads, a function that generates a batch with CTranslate2) for a converted copy of
    the model; compute_type as CTranslate2 names it."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    with tempfile.TemporaryDirectory(prefix="ctranslate2-") as temporary:
        copy, converted = Path(temporary, "model"), str(Path(temporary, "converted"))
        shutil.copytree(folder, copy)
        settings = copy / "tokenizer_config.json"
        known = json.loads(settings.read_text())  # the converter requires these names, used or not
        known |= dict.fromkeys(("bos_token", "unk_token"), tokenizer.id_to_token(0))
        settings.write_text(json.dumps(known))
        TransformersConverter(str(copy)).convert(converted)
        generator = ctranslate2.Generator(
            converted, compute_type=compute_type, inter_threads=1, intra_threads=threads
        )

    def generate(prompts, max_tokens):
        found = generator.generate_batch(
            [[tokenizer.id_to_token(token) for token in prompt] for prompt in prompts],
            min_length=max_tokens, max_length=max_tokens, sampling_topk=1, end_token=[],
            include_prompt_in_result=False,
        )
        return [one.sequences_ids[0] for one in found], None

    return threads, generate


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
