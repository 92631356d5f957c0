"""Who is compared by `python -m utils.serving.bench`, started and idle until it is asked.

    with ExitStack() as stack:
        world = World(stack, repo, version, prompt_tokens=32, new=64)
        world.choose_prompts(16)
        world.load("triton", 16, requests=2, seconds=None)       # a Load of 16 clients

All answer the same prompts, greedily, with the same number of new tokens. No answer ends early:
prompts are chosen that the engine answers in full, and transformers does not look for the end.
"""

import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from utils.serving.bench.peer import Peer
from utils.serving.engine.request import SamplingParams
from utils.serving.engine.version import Version
from utils.serving.load import Load, run
from utils.serving.model_config import engine_config

CONTENDERS = ("engine", "engine stream", "triton", "triton stream", "sequential", "static")
LIMIT = 300.0  # seconds of one load


def newest(repo: str | Path) -> Path:
    """The newest filled version folder of the repository's engine. Raises ValueError."""
    folders = [file.parent for file in Path(repo).glob("gpt_engine/*/manifest.json")]
    folders = [folder for folder in folders if folder.name.isdigit()]
    if not folders:
        raise ValueError(
            f"{repo} has no weights: python -m utils.serving.export --model FOLDER --tp N --out "
            f"{repo} puts them there"
        )
    return max(folders, key=lambda folder: int(folder.name))


class World:
    """All contenders, started and idle, and the prompts that they get.

    present, absent   names of contenders, and {name: why it is not here}
    different         {name: answers that are not those of transformers}
    """

    def __init__(
        self, stack: ExitStack, repo: str | Path, version: Version, prompt_tokens: int, new: int
    ):
        from utils.serving.client import Client
        from utils.serving.engine.engine import Engine
        from utils.serving.export import rebuild
        from utils.serving.server import TritonServer, server_available

        self.prompt_tokens, self.new, self.prompts = prompt_tokens, new, []
        config = engine_config(Path(repo) / "gpt_engine" / "config.pbtxt")
        self.slots = config.max_num_seqs
        self.engine = stack.enter_context(Engine(version.folder, **asdict(config)))
        self.threads = version.tp * self.engine.threads
        self.tokenizer = self.engine.decoder.tokenizer
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        whole = folder / "model"
        rebuild(version.folder, whole)
        self.peer = stack.enter_context(Peer(whole, self.threads))
        reason, self.client = server_available(), None
        if reason is None:
            server = stack.enter_context(TritonServer(repo, quiet=True))
            self.client = Client(server, timeout=LIMIT)
        self.absent = {name: reason for name in CONTENDERS if reason and name.startswith("triton")}
        self.present = [name for name in CONTENDERS if name not in self.absent]
        self.different = dict.fromkeys(self.present, 0)

    def choose_prompts(self, count: int) -> None:
        """`count` prompts of the corpus that survive text and tokens, and are answered in full."""
        from utils.data import corpus

        if self.prompt_tokens + self.new > self.engine.max_model_len:
            raise ValueError(
                f"{self.prompt_tokens} tokens and {self.new} new ones are more than the "
                f"{self.engine.max_model_len} positions of the model: lower --prompt-tokens"
            )
        text = bytes(corpus.load()[:200_000].tolist()).decode(errors="ignore")
        candidates = []
        for start in range(0, len(text) - 2000, 2000):
            ids = self.tokenizer.encode(text[start : start + 2000]).ids[: self.prompt_tokens]
            words = self.tokenizer.decode(ids)
            if len(ids) == self.prompt_tokens and self.tokenizer.encode(words).ids == ids:
                candidates.append((ids, words))
        wave = min(count, self.slots)
        for first in range(0, len(candidates), wave):
            some = candidates[first : first + wave]
            streams = [self.engine.submit(ids, self.sampling) for ids, _ in some]
            for (ids, words), stream in zip(some, streams, strict=True):
                answer = stream.result()
                if answer.finish == "length" and len(self.prompts) < count:
                    self.prompts.append((ids, words, answer.text))
            if len(self.prompts) == count:
                break
        if not self.prompts:
            raise ValueError(f"no text of the corpus is answered with {self.new} tokens: lower it")
        # one by one: what all others are compared with
        self.wanted = [self.peer.generate([ids], self.new)[0][0] for ids, _, _ in self.prompts]

    def warm_up(self) -> None:
        """A small load of each contender, that does not count."""
        for name in self.present:
            self.load(name, 2, 2, None)
            self.different[name] = 0

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.new, temperature=0.0)

    def load(self, name: str, many: int, requests: int, seconds: float | None) -> Load:
        """One load of a contender with so many clients: `requests` of each, but four at least in
        all; or for so many `seconds`."""
        requests = None if seconds else max(4, many * requests)
        if name in ("sequential", "static"):
            size = 1 if name == "sequential" else many
            if size == 1 and requests:  # its speed does not depend on how many wait
                requests = max(4, many)
            return self._batches(name, size, many, requests, seconds)
        send = getattr(self, "_" + name.replace(" ", "_"))
        load = run(send, many, requests, seconds, limit=LIMIT)
        if load.errors:
            raise RuntimeError(f"{name}: a request failed: {next(iter(load.errors))}")
        return load

    def _prompt(self, i):
        number = i % len(self.prompts)
        return number, *self.prompts[number]

    def _compare(self, name, same):
        self.different[name] += not same
        return [0] * self.new  # its tokens, to be counted by the load

    def _engine(self, i):
        number, ids, _, _ = self._prompt(i)
        answer = self.engine.complete(ids, self.sampling)
        return self._compare("engine", answer.tokens == self.wanted[number])

    def _engine_stream(self, i):
        number, ids, _, _ = self._prompt(i)
        tokens = []
        for chunk in self.engine.submit(ids, self.sampling):
            tokens += chunk.tokens
            yield []
        yield self._compare("engine stream", tokens == self.wanted[number])

    def _options(self):
        return {"max_tokens": self.new, "temperature": 0.0, "exclude_input_in_output": True}

    def _triton(self, i):
        _, _, words, text = self._prompt(i)
        return self._compare("triton", self.client.generate(words, **self._options()) == text)

    def _triton_stream(self, i):
        _, _, words, text = self._prompt(i)
        pieces = []
        for piece in self.client.stream(words, **self._options()):
            pieces.append(piece)
            yield []
        yield self._compare("triton stream", "".join(pieces) == text)

    def _batches(self, name, size, many, requests, seconds) -> Load:
        """`many` clients of a server that serves `size` requests at a time, in the order in which
        they come: a client's next request comes when it has its answer."""
        rows, ends, now = [], [], 0.0
        zero = time.perf_counter()
        while (requests is None and now < seconds) or (requests and len(rows) < requests):
            numbers = range(len(rows), len(rows) + min(size, (requests or 10**9) - len(rows)))
            prompts = [self._prompt(i) for i in numbers]
            begin = time.perf_counter() - zero
            tokens, first = self.peer.generate([ids for _, ids, _, _ in prompts], self.new)
            now = time.perf_counter() - zero
            for i, (number, *_), found in zip(numbers, prompts, tokens, strict=True):
                start = 0.0 if i < many else ends[i - many]
                rows.append((start, begin, begin + first, now, len(found), None))
                self._compare(name, found == self.wanted[number])
            ends += [now] * len(prompts)
        names = ["start", "sent", "first", "end", "tokens", "error"]
        glances = pd.DataFrame({"seconds": [], "count": []})
        return Load(pd.DataFrame(rows, columns=names), glances, now, many)
