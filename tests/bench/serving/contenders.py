"""The contenders of `python -m utils.serving.bench`, started and idle until they are called.

    with ExitStack() as stack:
        world = World(stack, repo, version, prompt_tokens=32, new=64)
        world.choose_prompts(size=16, batches=5, seed=0)
        world.take_batch(0)
        world.load("triton", 16, requests=32, seconds=None)       # a Load of 16 clients

All answer the same prompts, greedily, with the same number of new tokens. No answer ends early:
only prompts that the engine answers in full are chosen, and transformers ignores the end token.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from tests.bench.serving.peer import Peer
from utils.serving.engine.request import SamplingParams
from utils.serving.engine.version import Version
from utils.serving.gateway import Gateway
from utils.serving.load import Load, run
from utils.serving.model_config import engine_config

# Contenders that speak Triton's HTTP: a context whose `http` is the address.
ADDRESSES = {"triton": nullcontext, "gateway": Gateway}
SERVED = tuple(name + kind for name in ADDRESSES for kind in ("", " stream"))
CONTENDERS = ("engine", "engine stream", *SERVED, "sequential", "static", "ctranslate2")
LIMIT = 300.0  # seconds of one load


class Prompt(NamedTuple):
    """A prompt as token ids and as text; the right answer as the engine's text and the tokens of
    transformers."""

    ids: list[int]
    words: str
    text: str
    tokens: list[int]


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

    present, absent   names of contenders, and {name: why it is absent}
    threads           torch's threads of each contender: of all ranks together, or of transformers
    different         {name: number of answers that differ from those of transformers}
    """

    def __init__(
        self, stack: ExitStack, repo: str | Path, version: Version, prompt_tokens: int, new: int
    ):
        from utils.serving.client import Client
        from utils.serving.engine.engine import Engine
        from utils.serving.export import rebuild
        from utils.serving.server import TritonServer, server_available

        self.prompt_tokens, self.new = prompt_tokens, new
        # prompts repeat: a prefix cache would be an unfair advantage
        config = engine_config(Path(repo) / "gpt_engine" / "config.pbtxt")
        config = replace(config, enable_prefix_caching=False)
        self.slots = config.max_num_seqs
        self.engine = stack.enter_context(Engine(version.folder, **asdict(config)))
        self.threads = version.tp * self.engine.threads
        self.tokenizer = self.engine.decoder.tokenizer
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        whole = folder / "model"
        rebuild(version.folder, whole)
        self.peer = stack.enter_context(Peer(whole, self.threads))
        self._loads = {
            "engine": partial(self._clients, self._engine),
            "engine stream": partial(self._clients, self._engine_stream),
            "sequential": partial(self._batches, self.peer, 1),
            "static": partial(self._batches, self.peer, None),
        }
        if find_spec("ctranslate2"):
            peer = stack.enter_context(Peer(whole, self.threads, "ctranslate2"))
            self._loads["ctranslate2"] = partial(self._batches, peer, None)
        absent = dict.fromkeys(SERVED, reason := server_available())
        absent["ctranslate2"] = "CTranslate2 is not installed: pip install ctranslate2"
        if reason is None:
            self.server = stack.enter_context(TritonServer(repo, quiet=True))
            served = self.server.config("gpt_engine")
            served["parameters"]["enable_prefix_caching"] = {"string_value": "false"}
            self.server.unload("gpt_engine")
            self.server.load("gpt_engine", config=served)
            for name, at in ADDRESSES.items():
                client = Client(http=stack.enter_context(at(self.server)).http, timeout=LIMIT)
                for kind, send in (("", self._whole), (" stream", self._stream)):
                    self._loads[name + kind] = partial(self._clients, partial(send, client))
        self.absent = {name: absent[name] for name in CONTENDERS if name not in self._loads}
        self.present = [name for name in CONTENDERS if name in self._loads]

    def choose_prompts(self, size: int, batches: int, seed: int) -> None:
        """Draw `batches` of prompts by `seed`: texts of the corpus that survive tokenization and
        are answered in full. If the corpus has too few, they repeat."""
        if self.prompt_tokens + self.new > self.engine.max_model_len:
            raise ValueError(
                f"{self.prompt_tokens} tokens and {self.new} new ones are more than the "
                f"{self.engine.max_model_len} positions of the model: lower --prompt-tokens"
            )
        candidates, found = self._candidates(seed), []
        while len(found) < size * batches and (some := list(islice(candidates, self.slots))):
            streams = [self.engine.submit(ids, self._sampling()) for ids, _ in some]
            answers = [stream.result() for stream in streams]
            full = [pair for pair in zip(some, answers) if pair[1].finish == "length"]
            if full:
                tokens, _ = self.peer.generate([ids for (ids, _), _ in full], self.new)
                found += [Prompt(*pair, a.text, t) for (pair, a), t in zip(full, tokens)]
        if not found:
            raise ValueError(f"no text of the corpus is answered with {self.new} tokens: lower it")
        self._all = [
            [found[(batch * size + i) % len(found)] for i in range(size)]
            for batch in range(batches)
        ]

    def take_batch(self, number: int) -> None:
        """Let request i of every load use prompt i of this batch; count differences from zero."""
        self.prompts, self.different = self._all[number], dict.fromkeys(self.present, 0)

    def load(self, name: str, many: int, requests: int | None, seconds: float | None) -> Load:
        """Run one load of a contender with `many` clients: `requests` in all, or `seconds`."""
        load = self._loads[name](name, many, requests, seconds)
        if load.errors:
            raise RuntimeError(f"{name}: a request failed: {next(iter(load.errors))}")
        return load

    # ---- prompts and answers

    def _candidates(self, seed) -> Iterator[tuple[list[int], str]]:
        """Yield (token ids, text) of passages of the corpus, in random order."""
        from utils.data import corpus

        text = bytes(corpus.load().tolist()).decode(errors="ignore")
        length = max(2000, 16 * self.prompt_tokens)  # characters, more than enough
        starts = list(range(0, len(text) - length, 500))
        random.Random(seed).shuffle(starts)
        for start in starts:
            ids = self.tokenizer.encode(text[start : start + length]).ids[: self.prompt_tokens]
            words = self.tokenizer.decode(ids)
            if len(ids) == self.prompt_tokens and self.tokenizer.encode(words).ids == ids:
                yield ids, words

    def _sampling(self):
        return SamplingParams(max_tokens=self.new, temperature=0.0)

    def _prompt(self, i):
        return self.prompts[i % len(self.prompts)]

    def _compare(self, name, same):
        self.different[name] += not same
        return [0] * self.new  # its tokens, to be counted by the load

    # ---- how each is called

    def _clients(self, send, name, many, requests, seconds) -> Load:
        return run(partial(send, name), many, requests, seconds, limit=LIMIT)

    def _engine(self, name, i):
        prompt = self._prompt(i)
        answer = self.engine.complete(prompt.ids, self._sampling())
        return self._compare(name, answer.tokens == prompt.tokens)

    def _engine_stream(self, name, i):
        prompt, tokens = self._prompt(i), []
        for chunk in self.engine.submit(prompt.ids, self._sampling()):
            tokens += chunk.tokens
            yield []
        yield self._compare(name, tokens == prompt.tokens)

    def _options(self):
        return {"max_tokens": self.new, "temperature": 0.0, "exclude_input_in_output": True}

    def _whole(self, client, name, i):
        prompt = self._prompt(i)
        text = client.generate(prompt.words, **self._options())
        return self._compare(name, text == prompt.text)

    def _stream(self, client, name, i):
        prompt, pieces = self._prompt(i), []
        for piece in client.stream(prompt.words, **self._options()):
            pieces.append(piece)
            yield []
        yield self._compare(name, "".join(pieces) == prompt.text)

    def _batches(self, peer, size, name, many, requests, seconds) -> Load:
        """`many` clients of a server that serves `size` requests at a time (None: all) in order of
        arrival; a client sends its next request when it has its answer."""
        size, rows, ends, now = size or many, [], [], 0.0
        zero = time.perf_counter()
        while (requests is None and now < seconds) or (requests and len(rows) < requests):
            numbers = range(len(rows), len(rows) + min(size, (requests or 10**9) - len(rows)))
            prompts = [self._prompt(i) for i in numbers]
            begin = time.perf_counter() - zero
            tokens, first = peer.generate([prompt.ids for prompt in prompts], self.new)
            now = time.perf_counter() - zero
            for i, prompt, found in zip(numbers, prompts, tokens, strict=True):
                start = 0.0 if i < many else ends[i - many]
                rows.append(
                    (start, begin, now if first is None else begin + first, now, len(found), None)
                )
                self._compare(name, found == prompt.tokens)
            ends += [now] * len(prompts)
        names = ["start", "sent", "first", "end", "tokens", "error"]
        glances = pd.DataFrame({"seconds": [], "count": []})
        return Load(pd.DataFrame(rows, columns=names), glances, now, many)
