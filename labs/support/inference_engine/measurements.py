"""Given: the notebook's measurements of your answers; None if one of the files is missing."""

import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from labs.support.inference_engine import contracts, leader, streams
from utils.course.assertions import Wrong
from utils.course.runner import Trial
from utils.models.gpt import GPT
from utils.paths import ROOT
from utils.serving.engine.blocks import BLOCK, blocks_for


def measured(function: Callable[..., dict]) -> Callable[..., dict | None]:
    """Make a function of the learner's files run only if all are written, and print what is wrong
    instead of raising it."""

    @functools.wraps(function)
    def tried(*files: str, **options) -> dict | None:
        try:
            paths = [Path(file).resolve() for file in files]
            for path in paths:
                streams.not_started(path)
            return function(*paths, **options)
        except NotImplementedError:  # needs no message here
            return None
        except Wrong as error:
            return print(error)

    return tried


@measured
def batches(scheduler: Path) -> dict:
    """Rows per decode step of the six streams: with your scheduler, and one stream at a time."""

    def both(answer) -> dict:
        return {"yours": streams.streamed(answer.step), "alone": streams.streamed(leader.alone)}

    found = Trial(scheduler).alone("six real streams", both, clock=contracts.CLOCK)
    for tokens, _ in found.values():
        streams.right_streams(tokens)
    return {name: [len(step["slots"]) for step in steps] for name, (_, steps) in found.items()}


@measured
def together(rank: Path, scheduler: Path) -> dict:
    """Run your two files as one engine of two ranks and four slots. Returns its number of decode
    steps and, by rows per step, the bytes that rank 0 passed to all-reduces."""
    with tempfile.TemporaryDirectory(prefix="lab16-") as name:
        folder = Path(name)
        streams.fill(folder, streams.ENGINE, rank=rank)

        def engine(answer) -> tuple:
            return streams.streamed(answer.step, folder, slots=4)

        tokens, steps = Trial(scheduler).alone("two ranks", engine, clock=contracts.CLOCK)
    streams.right_streams(tokens)
    by_rows = {len(step["slots"]): step["bytes"] for step in steps}
    return {"steps": len(steps), "bytes": dict(sorted(by_rows.items()))}


# ---- c

LONGEST, SLOTS = 512, 8  # positions of the model; slots of LONGEST positions in memory
BEGINNINGS = (48, 96, 160)  # positions in each of three system prompts


def load() -> list[tuple[int, int]]:
    """400 requests: the index of each one's prompt in BEGINNINGS, and its total positions."""
    draw = random.Random(16)
    kinds = [draw.randrange(len(BEGINNINGS)) for _ in range(400)]
    own = [1 + int(draw.expovariate(1 / 60)) for _ in kinds]
    return [(kind, min(BEGINNINGS[kind] + more, LONGEST)) for kind, more in zip(kinds, own)]


@measured
def paged(path: Path) -> dict:
    """{way: requests, positions reserved, held and read} when the memory of 8 slots is full: with
    slots, with your blocks, and with blocks shared by requests with the same beginning."""
    return Trial(path).alone("a load of requests", admitted)


def admitted(answer) -> dict:
    """In one process: admit as many requests as fit in memory."""
    first = sum(positions for _, positions in load()[:SLOTS])
    found = {"slots": (SLOTS, SLOTS * LONGEST, first, first)}
    for way in ("blocks", "shared blocks"):
        blocks = answer.Blocks(SLOTS * LONGEST // BLOCK)
        requests = held = read = 0
        for kind, positions in load():
            keys = [f"{kind} {n}" for n in range(BEGINNINGS[kind] // BLOCK)] * (way != "blocks")
            there = blocks.find(keys)
            try:
                taken = blocks.take(blocks_for(positions) - len(there))
            except answer.NoBlocks:
                blocks.release(there)
                break
            for block, key in zip(taken, keys[len(there) :]):
                blocks.keep(block, key)
            requests, held = requests + 1, held + positions
            read += positions - BLOCK * len(there)
        found[way] = requests, BLOCK * sum(map(bool, blocks.readers)), held, read
    return found


# ---- d

NEW = 48  # tokens after each prompt


@measured
def speculated(path: Path, k: int = 4) -> dict:
    """Let models/tiny draft k tokens at a time for models/base, greedily. Returns whether the
    tokens are "equal" to those of base alone, its "passes", the number of "tokens", and how many
    drafted tokens were "judged" (to the first rejected one) and "accepted"."""
    return Trial(path).alone("models/tiny drafts", drafting, k, seconds=60.0)


@torch.inference_mode()
def drafting(answer, k: int) -> dict:
    """In one process, in fp64: the largest logit must be the same on every machine."""
    folders = (ROOT / "models" / name for name in ("tiny", "base"))
    draft, target = (GPT.from_pretrained(folder, dtype=torch.float64) for folder in folders)
    found = {"equal": True, "passes": 0, "tokens": 0, "judged": 0, "accepted": 0}
    for prompt in map(streams.prompt, range(len(streams.PROMPTS))):
        tokens = torch.tensor(prompt)
        while len(tokens) < len(prompt) + NEW:
            drafted = draft.generate(tokens[None], k, temperature=0)[0, len(tokens) :]
            logits = target(torch.cat([tokens, drafted])[None])[0, len(tokens) - 1 :]  # (k+1, V)
            best = logits.argmax(-1)
            q, p = (F.one_hot(one, logits.shape[1]).double() for one in (drafted, best))
            kept = answer.verify(drafted, q, p, torch.rand(k), lambda one: int(one.argmax()))
            tokens = torch.cat([tokens, torch.tensor(kept)])
            found["passes"] += 1
            found["tokens"] += len(kept)
            found["judged"] += min(len(kept), k)
            found["accepted"] += len(kept) - 1
        alone = target(tokens[None, :-1])[0, len(prompt) - 1 :].argmax(-1)  # after each token
        found["equal"] = found["equal"] and torch.equal(alone, tokens[len(prompt) :])
    return found
