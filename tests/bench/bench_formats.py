"""How fast the engine answers in each weight format, next to CTranslate2.

    python -m tests.bench.bench_formats [--model models/base] [--rounds 7]

On one thread each, all get the same prompts of 32 tokens and generate 64 more greedily, with 1, 4
and 16 requests at once. They take turns, in a different order each round, while the others are
idle; ratios are taken within a round, and the figure is their median. CTranslate2 takes part where
it is installed (pip install ctranslate2).
"""

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tests.bench.serving.peer import Peer
from utils.data import corpus
from utils.measure.machine import processor_name
from utils.models import hf_format
from utils.models.tokenizer import Tokenizer
from utils.serving.engine.engine import Engine
from utils.serving.engine.request import SamplingParams
from utils.serving.export import export

FORMATS = ("fp32", "bf16", "int8", "int4")
PEERS = {"CTranslate2, fp32": "ctranslate2", "CTranslate2, int8": "ctranslate2 int8"}
COMPARED = {"fp32": "CTranslate2, fp32", "int8": "CTranslate2, int8"}  # ours: theirs
REQUESTS = (1, 4, 16)
PROMPT, NEW = 32, 64  # tokens

Ask = Callable[[list[list[int]]], None]


def measure(model: Path | str, rounds: int = 7) -> dict:
    """Return {"what", "rounds", "requests", "contenders": [{"name", "of fp32", "of CTranslate2"}]}.
    The last two list ratios of tokens per second by number of requests; "of CTranslate2" compares
    with its format of the same name, where it is installed."""
    rates = {}  # {(contender, requests): tokens per second in each round}
    with ExitStack() as stack:
        ask = _contenders(stack, Path(model))
        prompts = _prompts(Path(model), max(REQUESTS) * (rounds + 1))
        for turn in range(rounds + 1):
            start = turn % len(ask)
            batch = prompts[turn * max(REQUESTS) :]
            for many in REQUESTS:
                for name in [*ask][start:] + [*ask][:start]:
                    begin = time.perf_counter()
                    ask[name](batch[:many])
                    rate = many * NEW / (time.perf_counter() - begin)
                    rates.setdefault((name, many), []).append(rate)
            print(f"round {turn} of {rounds}", "which does not count" * (not turn), flush=True)
    contenders = []
    for name in ask:
        contenders.append({"name": name, "of fp32": _ratios(rates, name, "fp32")})
        if (peer := COMPARED.get(name)) in ask:
            contenders[-1]["of CTranslate2"] = _ratios(rates, name, peer)
    return {
        "what": f"{PROMPT} tokens in, {NEW} out, greedy, one thread each, {processor_name()}",
        "rounds": rounds,
        "requests": list(REQUESTS),
        "contenders": contenders,
    }


def _ratios(rates, name, other):
    """Medians over all rounds except the first, for each number of requests."""
    return [
        round(statistics.median(a / b for a, b in zip(rates[name, n][1:], rates[other, n][1:])), 3)
        for n in REQUESTS
    ]


def _contenders(stack: ExitStack, model: Path) -> dict[str, Ask]:
    """Start the contenders; return {name: a function that answers prompts}."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="formats-")))
    endless, ask = folder / "endless", {}
    shutil.copytree(model, endless)  # without an end token, every answer has its full length
    config = hf_format.read_json(endless / hf_format.CONFIG)
    hf_format.write_json(endless / hf_format.CONFIG, config | {"eos_token_id": None})
    for number, name in enumerate(FORMATS, start=1):
        version = export(endless, folder / "models", tp=1, version=number, dtype=name)
        engine = stack.enter_context(Engine(version, threads=1, enable_prefix_caching=False))
        ask[name] = partial(_ours, engine)
    for name, library in PEERS.items():
        if find_spec("ctranslate2"):
            ask[name] = partial(_theirs, stack.enter_context(Peer(model, 1, library)))
    return ask


def _ours(engine, prompts):
    wanted = SamplingParams(max_tokens=NEW)
    streams = [engine.submit(prompt, wanted) for prompt in prompts]
    assert all(len(stream.result().tokens) == NEW for stream in streams)


def _theirs(peer, prompts):
    tokens, _ = peer.generate(prompts, NEW)
    assert all(len(row) == NEW for row in tokens)


def _prompts(model, count):
    """Draw `count` different passages of PROMPT tokens from the corpus."""
    tokens = corpus.load_split(None, Tokenizer.load(model))[0]
    starts = random.Random(0).sample(range(0, len(tokens) - PROMPT, PROMPT), count)
    return [tokens[start : start + PROMPT].tolist() for start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine in each format, and CTranslate2.")
    parser.add_argument("--model", default="models/base", help="checkpoint folder")
    parser.add_argument("--rounds", type=int, default=7, help="in which all take turns")
    options = parser.parse_args()
    found = measure(options.model, options.rounds)
    print(f"tokens per second, {found['what']}; {found['requests']} at once")
    for one in found["contenders"]:
        ratios = {of: one[of] for of in ("of fp32", "of CTranslate2") if of in one}
        print(f"{one['name']:<18}", *(f"{of}: {each}" for of, each in ratios.items()), sep="  ")


if __name__ == "__main__":
    main()
