"""Given: lab 16's model, its tokens after three prompts, and six streams that test an engine.

    fill(folder, ENGINE, rank="rank.py")    # what two rank processes need, with your rank.py
    tokens, steps = streamed(step, folder)  # six requests to a Leader with your `step`

Everything runs in processes of this machine: the checks of this lab need no server.
"""

import ast
import functools
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer

from labs.support.inference_engine.leader import Leader, Request
from labs.support.inference_engine.model_shard import Shard
from labs.support.inference_engine.ranks import Ranks
from utils.course.assertions import Wrong
from utils.models.gpt import GPT
from utils.paths import ROOT

GIVEN = Path(__file__).resolve().parent
CHECKPOINT = ROOT / "models" / "small"
# what a folder with a rank.py and a scheduler.py needs
ENGINE = [GIVEN / name for name in ("leader.py", "ranks.py", "start_rank.py", "model_shard.py")]
PROMPTS = ("The list of", "class Queue:\n    def __init__(self", "import os\n\ndef main():\n")
SECONDS = 40.0  # within which a stream must end
STEP = 15.0  # seconds within which rank processes must take a step
SLOTS = 3
# prompt, length, and the step in which it arrives. The first is long; the next three arrive with it
# or soon after, one more than there are slots; the fifth waits; the last finds free slots
STREAMS = ((0, 40, 0), (1, 14, 0), (2, 6, 0), (0, 9, 2), (1, 3, 3), (2, 4, 24))


# ---- the reference for the answers


@functools.cache
def prompt(number: int) -> tuple[int, ...]:
    """Tokens of one of PROMPTS."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return tuple(tokenizer.encode(PROMPTS[number]).ids)


@functools.cache
def model() -> GPT:
    """The whole model, fp32."""
    torch.set_num_threads(1)  # too small a model for a second thread to help
    return GPT.from_pretrained(CHECKPOINT, dtype=torch.float32)


@functools.cache
def right(number: int, count: int = 48) -> tuple[int, ...]:
    """The whole model's greedy tokens after a prompt, from GPT.generate."""
    tokens = prompt(number)
    made = model().generate(torch.tensor([tokens]), count, temperature=0)
    return tuple(made[0, len(tokens) :].tolist())


def the_models(case: str, tokens: list[int], number: int) -> None:
    """Raise Wrong if the tokens after a prompt are not the whole model's."""
    wanted = list(right(number)[: len(tokens)])
    if tokens != wanted:
        raise Wrong(f"{case} has the tokens {tokens}, and {wanted} are the whole model's.")


def not_started(path: Path) -> None:
    """Raise NotImplementedError with the file's first unfinished task, before any process
    starts."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and "NotImplementedError(" in ast.unparse(node):
            raise NotImplementedError(ast.literal_eval(node.exc.args[0]))


# ---- an engine


def fill(folder: Path, files: Iterable[Path], **answers: Path) -> None:
    """Fill the folder with the checkpoint, `utils`, given files and answers (rank=its path)."""
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(CHECKPOINT / name)
    (folder / "utils").symlink_to(ROOT / "utils")  # an export copies only what it needs
    for path in files:
        shutil.copy(path, folder / path.name)
    for name, path in answers.items():
        shutil.copy(path, folder / f"{name}.py")


class Client:
    """The receiver of one request's tokens."""

    def __init__(self) -> None:
        self.tokens, self.error, self.ended = [], None, threading.Event()

    def send(self, token: int) -> None:
        self.tokens.append(token)

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended.set()

    def cancelled(self) -> bool:
        return False


def streamed(
    step: Callable, folder: Path | None = None, slots: int = SLOTS
) -> tuple[list[list[int]], list[dict]]:
    """Run STREAMS through a Leader with this `step`: the tokens of each, and the decode steps.
    folder: has the files of two ranks; None: the whole model in this process. Raises Wrong."""
    with tempfile.TemporaryDirectory(prefix="lab16-") as here:
        diary = (folder or Path(here)) / "diary-0"
        if folder:
            model = Ranks(folder, 2, slots, STEP)
        else:
            model = Shard(CHECKPOINT, slots=slots, diary=diary)
        leader = Leader(model, step, slots, positions=512)
        try:
            clients = [Client() for _ in STREAMS]
            for client, (number, tokens, after) in zip(clients, STREAMS):
                arrival = len(STREAMS), after
                leader.submit(Request(list(prompt(number)), tokens, client, arrival))
            for client, (_, tokens, after) in zip(clients, STREAMS):
                case = f"the stream of {tokens} tokens that comes in step {after}"
                if not client.ended.wait(SECONDS):
                    raise Wrong(f"{case} has not ended after {SECONDS:g} s.")
                if client.error:
                    raise Wrong(f"{case} fails: {client.error}")
        finally:
            leader.close()
            model.close()
        steps = map(json.loads, diary.read_text().splitlines())
        return [client.tokens for client in clients], [s for s in steps if s["do"] == "decode"]


def right_streams(tokens: list[list[int]]) -> None:
    """Raise Wrong if the tokens of any of STREAMS differ from those it gets alone."""
    for made, (number, count, after) in zip(tokens, STREAMS):
        case = f"the stream of {count} tokens that comes in step {after}"
        the_models(case, made, number)
        if len(made) != count:
            raise Wrong(f"{case} has {len(made)}.")
