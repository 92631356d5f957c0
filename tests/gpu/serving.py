"""The serving engine on a GPU: the CPU's tokens, and tokens per second."""

import tempfile
import time
from collections.abc import Iterator

import torch

from tests.gpu.child import tried
from utils.models.tokenizer import Tokenizer
from utils.paths import ROOT
from utils.serving.engine.engine import Engine
from utils.serving.engine.request import SamplingParams
from utils.serving.export import export

PROMPTS = ("import ", "def main(", "class ", "The ", "for each in ", "return ", "with open(", "if ")


def engine(rehearse: bool) -> Iterator[tuple[str, dict]]:
    model = ROOT / "models" / ("tiny" if rehearse else "base")
    tokenizer = Tokenizer.load(model)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    where, count = ("cpu", 8) if rehearse else ("cuda", 128)
    tps = [1, 2] if torch.cuda.device_count() > 1 else [1]
    with tempfile.TemporaryDirectory() as folder:
        for tp in tps:
            version = export(model, f"{folder}/{tp}", tp)
            truth = tokens(version, prompts, "cpu")
            yield f"greedy tokens, tp {tp}", tried(equal, version, prompts, where, truth)
            for dtype in ("float32", "bfloat16"):
                name = f"{dtype}, tp {tp}"
                yield name, tried(speeds, version, prompts, where, dtype, count)


def tokens(version, prompts: list, where: str) -> list:
    with Engine(version, device=where, dtype="float32") as served:
        return [served.complete(one, SamplingParams(max_tokens=32)).tokens for one in prompts]


def equal(version, prompts: list, where: str, truth: list) -> dict:
    """The number of answers and tokens; raises ValueError if an answer differs from the CPU's."""
    mine = tokens(version, prompts, where)
    wrong = sum(one != other for one, other in zip(mine, truth))
    if wrong:
        raise ValueError(f"{wrong} of {len(prompts)} answers are not the CPU's")
    return {"answers": len(prompts), "tokens": sum(map(len, truth))}


def speeds(version, prompts: list, where: str, dtype: str, count: int) -> dict:
    """Tokens per second of one request and of 16 that share each step."""
    found = {}
    with Engine(version, device=where, dtype=dtype, max_num_seqs=16) as served:
        for many in (1, 16):
            wanted = [prompts[number % len(prompts)] for number in range(many)]
            answered(served, wanted, 8)  # warms up
            began = time.perf_counter()
            made = answered(served, wanted, count)
            found[f"tokens_per_s_at_{many}"] = made / (time.perf_counter() - began)
    return found


def answered(served: Engine, prompts: list, count: int) -> int:
    """The number of tokens in all answers."""
    how = SamplingParams(max_tokens=count)
    streams = [served.submit(one, how) for one in prompts]
    return sum(len(stream.result().tokens) for stream in streams)
