"""transformers.generate in a process of its own: what the bench compares the engine with.

    peer = Peer(folder, threads=2)                  # a Hugging Face folder
    tokens, first = peer.generate([[5, 7], [3, 9]], max_tokens=32)     # one batch, greedy
    peer.close()

The process waits at a pipe, one line of JSON in and one out, so that it does nothing while others
are measured. fp32, greedy, and no end before max_tokens: the end token is not looked for. Prompts
of a batch have one length, so nothing is padded: the best case of a static batch.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time


class Peer:
    """The process. Raises RuntimeError with its last words when it ends or does not answer."""

    def __init__(self, folder, threads, seconds=180.0):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "utils.serving.bench.peer", str(folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        try:
            self._answer(seconds)
        except BaseException:
            self.close()
            raise

    def generate(self, prompts, max_tokens, seconds=300.0):
        """(new tokens of each prompt, seconds until the first ones) of one batch."""
        question = {"prompts": prompts, "max_tokens": max_tokens}
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"transformers ended: {self._last_words()}") from None
        answer = self._answer(seconds)
        return answer["tokens"], answer["first"]

    def close(self):
        """Ends the process: it ends by itself when its pipe closes, else it is killed."""
        self._process.stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _answer(self, seconds):
        pipe, line, deadline = self._process.stdout.fileno(), b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"transformers did not answer within {seconds:g} s")
            data = os.read(pipe, 1 << 20)
            if not data:
                raise RuntimeError(f"transformers ended: {self._last_words()}")
            line += data
        return json.loads(line)

    def _last_words(self):
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def main(folder, threads):
    """The process: serves lines until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer
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

    print("{}", file=answers, flush=True)  # ready
    for line in sys.stdin:
        print(json.dumps(generate(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
