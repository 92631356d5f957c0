"""Given: a training loop that saves at each step, in processes that are killed one after the other.

Each life is a fork of the rank: it loads, trains on from there, and is killed in one of its saves,
before a call that changes the folder, at a byte of a file, or after a time. Training is a few
lines; its random numbers come from the state, so a run that goes on ends as one that was not
disturbed.
"""

import contextlib
import linecache
import mmap
import os
import pickle
import random
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from labs.support.fault_tolerance.power import Watch
from utils.course.assertions import Wrong, bitwise_equal, described
from utils.course.runner import load_answer

SECONDS = 10  # until a life is ended
SAVES, EVERY = 4, 3  # of a life, at most; steps between two of them, at most
BEGUN, RETURNED, ARMED = range(3)  # places on the board


def difference(right: dict, found: Any) -> str | None:
    """How a loaded state differs from the one that was saved; None: not at all."""
    if not isinstance(found, dict):
        return f"the state is {described(found)}, not a dict"
    for name in [*right, *found]:
        if name not in found or name not in right:
            return f"{described(name)} is {'missing' if name in right else 'not of this state'}"
        was, now = right[name], found[name]
        if not isinstance(was, torch.Tensor):
            if type(was) is not type(now) or repr(was) != repr(now):
                return f"{described(name)} is {described(now)}, and {described(was)} was saved"
        elif not isinstance(now, torch.Tensor):
            return f"{described(name)} is {described(now)}, not a tensor"
        elif (was.dtype, was.shape) != (now.dtype, now.shape):
            kinds = [f"{t.dtype} of shape {tuple(t.shape)}" for t in (now, was)]
            return f"{described(name)} is {kinds[0]}, and {kinds[1]} was saved"
        elif not bitwise_equal(was, now):
            return f"{described(name)} does not have the bits that were saved"
    return None


def loaded(answer: Any, folder: Path, states: dict[int, dict]) -> tuple[int, Any]:
    """(step, state) that `load` gives, (0, None) where it gives None: a state of `states` with all
    its bits, or Wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = answer.load(folder)
    if found is None:
        return 0, None
    if not isinstance(found, tuple | list) or len(found) != 2 or type(found[0]) is not int:
        raise Wrong(f"load gives {described(found)}, and (step, state) or None is asked for.")
    step, state = found
    if step not in states or step == 0:
        raise Wrong(f"load gives step {step}, which was never saved.")
    wrong = difference(states[step], state)
    if wrong:
        raise Wrong(f"load gives a state of step {step} that was never saved: {wrong}.")
    return step, state


# ---- the training


def new_state(seed: int) -> dict:
    """Before the first step."""
    numbers = torch.Generator().manual_seed(seed)
    weights = torch.randn(48, 40, generator=numbers)
    return {
        "weights": weights, "velocity": torch.zeros_like(weights, dtype=torch.float64),
        "random": numbers.get_state(), "tokens": 0, "loss": float("inf"),
    }


def train(state: dict) -> None:
    """One step, in place."""
    numbers = torch.Generator()
    numbers.set_state(state["random"])
    gradient = torch.randn(state["weights"].shape, generator=numbers) + state["weights"]
    state["velocity"].mul_(0.9).add_(gradient)
    state["weights"].sub_(state["velocity"], alpha=0.01)
    state["random"] = numbers.get_state()
    state["tokens"] += 512
    state["loss"] = state["weights"].square().mean().item()


def copied(state: dict) -> dict:
    """With tensors of its own."""
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}


def all_states(seed: int, steps: int) -> dict[int, dict]:
    """The states after 0, 1, … steps of an undisturbed run; that of step 0 is not saved."""
    state = new_state(seed)
    found = {0: copied(state)}
    for step in range(1, steps + 1):
        train(state)
        found[step] = copied(state)
    return found


# ---- a process of its own


def apart(function: Callable, *args: Any) -> Any:
    """function(*args) in a fork of this process; Wrong with what went wrong there."""
    return result(*forked(function, *args))


def forked(function: Callable, *args: Any) -> tuple[int, int]:
    """Starts it: (process id, where its result will be read)."""
    theirs, ours = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child does not use them
        pid = os.fork()
    if pid:
        os.close(ours)
        return pid, theirs
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        os.close(theirs)
        try:
            said = True, function(*args)
        except Wrong as error:
            said = False, str(error)
        except BaseException as error:
            said = False, _explained(error)
        with os.fdopen(ours, "wb") as pipe:
            pipe.write(pickle.dumps(said))
        sys.stdout.flush()
    finally:
        os._exit(0)


def result(pid: int, pipe: int) -> Any:
    """What it returned; None where it was killed."""
    with os.fdopen(pipe, "rb") as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        raise Wrong(f"no end after {SECONDS} s: an endless loop?")
    try:
        right, value = pickle.loads(said)
    except (EOFError, pickle.UnpicklingError):
        return None
    if not right:
        raise Wrong(value)
    return value


def _explained(error: BaseException) -> str:
    """An exception, with the last line of the answer that took part."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if "checkpoint.py" in f.filename]
    own = [frame for frame in own if "check_checkpoint" not in frame.filename]
    place = ""
    if own:
        line = linecache.getline(own[-1].filename, own[-1].lineno).strip()
        place = f" in {Path(own[-1].filename).name} line {own[-1].lineno} (`{line}`)"
    return f"{type(error).__name__}{place}: {error}"


# ---- lives


@dataclass(frozen=True)
class Kill:
    """How a life ends, in one of its saves. how: "call": before call number `at` that changes the
    folder; "byte": when a file is about to become longer than `at` bytes; "time": `at` seconds
    after the save began, or in a later one. every: steps between two saves of this life."""

    how: str
    at: float
    save: int
    words: str = ""
    every: int = 1

    def __str__(self):
        if self.how == "call":
            return f"killed in a save, before its call {self.at} ({self.words})"
        if self.how == "byte":
            return f"killed when a file had {self.at:,} bytes"
        return f"killed {1000 * self.at:.2f} ms after a save had begun"


class Board:
    """Numbers that a life and its parent share."""

    def __init__(self):
        self._view = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")

    def __getitem__(self, place: int) -> int:
        return self._view[place]

    def __setitem__(self, place: int, value: int) -> None:
        self._view[place] = value


def calls_of_a_save(
    file: Path, folder: Path, states: dict[int, dict]
) -> tuple[list[str], int, float]:
    """In a fork: of a save when others are there, (its calls, bytes of the largest file, seconds).
    The folder is left as after a run of some steps."""
    calls: list[str] = []
    Watch(folder, calls.append)
    answer = load_answer(file)
    for step in range(1, SAVES + 1):
        calls.clear()
        begin = time.perf_counter()
        answer.save(folder, copied(states[step]), step)
        seconds = time.perf_counter() - begin
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return list(calls), max(sizes, default=0), seconds


def live(file: Path, folder: Path, states: dict[int, dict], board: Board, kill: Kill | None) -> int:
    """In a fork: one life, that ends in `kill`; without one it makes two steps, and returns the
    last. Before it, the step that was loaded is checked."""
    left = -1  # calls until the end, once it is near

    def called(_: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            die()

    Watch(folder, called)
    answer = load_answer(file)
    step, state = loaded(answer, folder, states)
    if not board[RETURNED] <= step <= board[BEGUN]:
        wanted = f"save had returned for step {board[RETURNED]}"
        if board[BEGUN] > board[RETURNED]:
            wanted += f", and step {board[BEGUN]} was being saved"
        raise Wrong(f"load gives {f'step {step}' if step else 'None'}; {wanted}.")
    board[RETURNED] = step  # the newest there is, and the least there may be from now on
    state = state or copied(states[0])
    for number in range(1, 3 if kill is None else SAVES + 1):
        for _ in range(kill.every if kill else 1):
            train(state)
            step += 1
        board[BEGUN] = step
        if kill and number == kill.save:
            board[ARMED] = 1
            if kill.how == "call":
                left = kill.at
            elif kill.how == "byte":
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (kill.at, kill.at))
        answer.save(folder, state, step)
        board[RETURNED] = step
        if kill and number >= kill.save and kill.how != "time":
            die()
    if kill:
        die()
    return step


def killed(file: Path, folder: Path, states: dict[int, dict], board: Board, kill: Kill) -> None:
    """One life, to its end."""
    board[ARMED] = 0
    pid, pipe = forked(live, file, folder, states, board, kill)
    if kill.how == "time":
        while not board[ARMED] and not select.select([pipe], [], [], 0.0005)[0]:
            pass  # it has not begun to save, and has not ended
        time.sleep(kill.at)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    result(pid, pipe)


def drawn_kills(draw: random.Random, calls: list[str], size: int, seconds: float) -> list[Kill]:
    """15 before calls, all where there are no more, and after each of these one at a byte of what
    the next life writes first; 5 more before calls, 15 at a time."""
    places = list(range(1, len(calls) + 1)) or [1]
    first = draw.sample(places, min(15, len(places)))
    first += draw.choices(places, k=20 - len(first))

    def before(at: int) -> Kill:
        return Kill("call", at, draw.randrange(1, 4), calls[at - 1] if calls else "")

    ends = [0, 1, max(1, size - 1), *(draw.randrange(size + 1) for _ in range(12))]
    groups = [[before(at), Kill("byte", end, 1)] for at, end in zip(first, ends)]
    groups += [[before(at)] for at in first[len(ends) :]]
    times = [2 * seconds * draw.random() for _ in range(15)]
    groups += [[Kill("time", at, draw.randrange(1, 3))] for at in times]
    draw.shuffle(groups)
    return [replace(kill, every=draw.randint(1, EVERY)) for group in groups for kill in group]


def die() -> None:
    """As `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)
