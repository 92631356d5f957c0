"""How a check tries an answer: on real ranks, with cases from a seed, under hard limits.

    def judge(trial: Trial) -> str:
        for group in trial.groups(hang="Does every rank call it?"):       # 2, 3, 1, 4, 5, 6 ranks
            length, seed = trial.draw.randrange(1, 40), trial.new_seed()
            case = group.case(f"{length} numbers")
            for rank, seen in enumerate(group.run(case, scenario, length, seed)):
                close(f"{case}, rank {rank}", "the sum", seen, right)
        return "what was tested."

A *scenario* is a function that runs on every rank: `scenario(answer, *args)`, where `answer` is the
module made from the learner's file. An answer's code runs nowhere else: it may end its process,
block, or swallow every exception, and the check still ends.

Ranks have their own random numbers, as on a cluster. The result of a run is a list by rank.
"""

import contextlib
import faulthandler
import importlib.util
import linecache
import os
import random
import re
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from utils.course.assertions import NotHere, Wrong, forbid
from utils.course.slow_network import late as late_network
from utils.ranks import RankError, Ranks
from utils.ranks.diagnosis import consequence, timed_out
from utils.ranks.pool import PRELOADED, Dead
from utils.ranks.worker import Failure

PRELOADED.append(__name__)  # else every rank of a check would import it, a fifth of its time

SIZES = (2, 3, 1, 4, 5, 6)  # ranks; most mistakes show with two or three
HANG = 30.0  # seconds until a collective counts as hanging if no deadlock is seen (macOS)
TOO_LONG = 6.0  # seconds of processor time until an answer counts as an endless loop
ASLEEP = 60.0  # wall-clock seconds, for one that sleeps: on a busy machine others wait, too
JUDGES = (  # in a rank's stack
    r" (runner|observe|slow_network|messages|assertions|properties|contracts?|traffic|scenarios"
    r"|fault_injection|elastic_training|check_\w+)\.py:\d+: "
)
SWALLOWED = 1.0  # seconds after that until its process is ended, whatever it catches


class Trial:
    """One check of one answer.

    path: the learner's file; seed: of all cases; drawn: whether a case was drawn from it.
    """

    def __init__(self, path: str | Path, seed: int = 0):
        self.path, self.seed, self.drawn = Path(path).resolve(), seed, False
        self._draw = random.Random(seed)

    @property
    def draw(self) -> random.Random:
        """The generator that cases are drawn from."""
        self.drawn = True
        return self._draw

    def new_seed(self) -> int:
        """A seed for the values of one case."""
        return self.draw.getrandbits(31)

    def fractions(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Random values from a normal distribution; almost none is an integer."""
        return fractions(self.new_seed(), *shape, dtype=dtype)

    def forbid(self, library: Iterable[str]) -> None:
        """The file must not name these, as in `assertions.forbid`."""
        forbid(self.path, library)

    @contextlib.contextmanager
    def ranks(
        self, size: int, hang: str | dict[str, str] = "", may_die: bool = False
    ) -> Iterator["Group"]:
        """`size` fresh ranks. hang: what to ask when they wait for one another; {call: question}
        if it depends on the call that all of them wait in, with "" for any other. may_die: the
        result of a killed rank is `utils.ranks.pool.Dead`, and the others continue."""
        with (
            tempfile.TemporaryDirectory(prefix="trial-") as folder,
            Ranks(
                size, device="cpu", timeout=HANG, may_die=may_die, end_deadlocks=not may_die
            ) as ranks,
        ):
            yield Group(self, ranks, Path(folder), hang)

    def groups(
        self, sizes: Sequence[int] = SIZES, hang: str | dict[str, str] = ""
    ) -> Iterator["Group"]:
        """Fresh ranks of each size in turn."""
        for size in sizes:
            with self.ranks(size, hang) as group:
                yield group

    def on_ranks(self, size: int, scenario: Callable, *args: Any, hang: str = "") -> list:
        """One run on `size` fresh ranks."""
        with self.ranks(size, hang) as group:
            return group.run(group.case(), scenario, *args)

    def alone(self, case: str, scenario: Callable, *args: Any, **options: Any) -> Any:
        """One run in its own process; `case` begins the sentence about a failure.
        options: of `Group.run`."""
        with self.ranks(1) as group:
            return group.run(case, scenario, *args, **options)[0]


def attempted(
    file: str | Path, size: int, scenario: Callable, *args: Any, seconds: float | None = None
) -> list | None:
    """The results of `scenario(answer, *args)` by rank, for a notebook to show; None if the file
    is not written yet or does not run. seconds: as for `Group.run`."""
    try:
        with Trial(file).ranks(size) as group:
            return group.run(group.case(), scenario, *args, seconds=seconds)
    except (NotImplementedError, Wrong):
        return None


class Group:
    """Ranks that try an answer together, run after run. size: the number of ranks."""

    def __init__(self, trial: Trial, ranks: Ranks, folder: Path, hang: str | dict[str, str]):
        self.size = ranks.size
        self._trial, self._ranks, self._folder = trial, ranks, folder
        self._hang = hang if isinstance(hang, dict) else {"": hang}
        self.pids = ranks.pids  # by rank

    def case(self, what: str = "") -> str:
        """ "with 3 ranks and a tensor of shape (5,)", for `what` "a tensor of shape (5,)"."""
        return f"with {self.size} rank{'s' * (self.size > 1)}{' and ' * bool(what)}{what}"

    def run(
        self,
        case: str,
        scenario: Callable,
        *args: Any,
        late: bool = False,
        seconds: float | None = None,
        clock: float | None = None,
    ) -> list:
        """The results of `scenario(answer, *args)` by rank.

        late: on a slow network (`utils/course/slow_network.py`). seconds: of processor time, until
        an answer is ended, None: TOO_LONG. clock: seconds until one that sleeps is ended, None:
        ASLEEP, or ten times `seconds` if that is more. Raises Wrong with the case, the place in
        the answer and what happened there if it fails, hangs or does not end; NotImplementedError
        for a stub.
        """
        trial = self._trial
        cloudpickle.register_pickle_by_value(sys.modules[scenario.__module__])
        seconds = seconds or TOO_LONG
        self._limits = seconds, clock or max(ASLEEP, 10 * seconds)
        seed = trial._draw.getrandbits(31)  # not a case: it does not count as drawn
        setup = str(trial.path), str(self._folder), self._limits, seed, late
        try:
            results = self._ranks.run(_perform, setup, scenario, args)
        except RankError as error:
            raise self._explained(case, error) from None
        for rank, result in enumerate(results):
            if isinstance(result, Dead) and result.code != -signal.SIGKILL:
                said = (self._folder / f"rank{rank}.words").read_text(errors="replace")
                ended = f"Rank {rank} ended with code {result.code}"
                raise Wrong(f"{case}{self._rank(rank)}: {self._died(said, ended)}")
        return results

    def kill(self) -> None:
        """Kill ranks that may die, from another thread: the current run returns `Dead` for them."""
        for rank in self._ranks.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)

    def _explained(self, case: str, error: RankError) -> Exception:
        """The exception with which a check reports a failed run."""
        failures = error.failures
        for failure in failures.values():
            last = failure.stack[-1].file if failure.stack else ""
            if (
                failure.kind == "NotImplementedError"
                and Path(last).parent == self._trial.path.parent
            ):
                return NotImplementedError(failure.message)
            if failure.kind == "NotHere":
                return NotHere(failure.message)
        for rank, failure in failures.items():
            if not timed_out(failure) and not consequence(failure):
                return Wrong(f"{case}{self._rank(rank)}: {self._ended(failure)}")
        for file in sorted(self._folder.glob("rank*.words")):
            said = file.read_text(errors="replace")
            if said.strip():
                return Wrong(
                    f"{case}{self._rank(int(file.stem[4:]))}: {self._died(said, str(error))}"
                )
        return Wrong(f"{case}: {of_interest(str(error))}{self._question(str(error))}")

    def _question(self, error: str) -> str:
        """What to ask about ranks that wait for one another."""
        if "did not complete" not in error:
            return ""
        states = set(re.findall(r"│ (waiting in .+|had finished|running.*)$", error, re.M))
        calls = {state.removeprefix("waiting in ") for state in states}
        question = self._hang.get(calls.pop() if len(calls) == 1 else "", self._hang.get("", ""))
        return f"\n{question}" if question else ""

    def _rank(self, rank: int) -> str:
        return f", rank {rank}" if self.size > 1 else ""

    def _ended(self, failure: Failure) -> str:
        """An exception, in a sentence."""
        place = self._place([(frame.file, frame.line) for frame in failure.stack])
        if failure.kind == "Wrong":
            return failure.message
        if failure.kind == "TimeLimit":
            return f"{failure.message}{place}: an endless loop?"
        if failure.kind == "SystemExit":
            return f"the code exits the program{place}; a function should return."
        return f"{failure.kind}{place}: {failure.message}"

    def _died(self, said: str, error: str) -> str:
        """A process that has ended, in a sentence, from what faulthandler wrote as it ended."""
        stack = re.findall(r'File "(.+)", line (\d+) in', said)
        place = self._place([(file, int(line)) for file, line in reversed(stack)])
        if "Timeout (" in said:
            processor, clock = self._limits
            seconds = processor if "(swallowed)" in said else clock
            return f"did not finish within {seconds:.0f} s{place}: an endless loop?"
        if "preamble.length" in error or "preamble.length" in said:
            return (
                f"a message does not fit where it is received{place}: do all ranks pass the\n"
                "lengths and types that the others expect?"
            )
        ended = re.search(r"Rank \d+ (was killed by \w+|ended with code \d+)", error)
        return f"the process {ended[1] if ended else 'has ended'}{place}."

    def _place(self, stack: Sequence[tuple[str, int]]) -> str:
        """ " in ring.py line 12 (`total += part`)": the answer's last line in the stack."""
        own = [(file, line) for file, line in stack if Path(file).parent == self._trial.path.parent]
        if not own:
            return ""
        file, line = own[-1]
        code = linecache.getline(file, line).strip()
        return f" in {Path(file).name} line {line}" + (f" (`{code}`)" if code else "")


def fractions(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random values from a normal distribution, the same for the same seed on every machine."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)


def compile_answer(path: Path) -> types.CodeType:
    """The code of the file as it is now, even if it was imported before."""
    return compile(path.read_text(encoding="utf-8"), str(path), "exec")


def load_answer(path: Path) -> types.ModuleType:
    """A new module made from the file, which can import files in the same folder."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"answer_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile_answer(path), module.__dict__)
    return module


def of_interest(text: str) -> str:
    """A RankError without the judge's own lines, and without advice for the ranks' owner."""
    lines, label = [], ""
    for line in text.splitlines():
        head, bar, rest = line.partition("│")
        if bar and re.match(JUDGES, rest):
            label = head if head.strip() else label  # of the rank: for the next line
        elif not re.match(r"The (other )?ranks (stay|were)", line):
            lines.append(f"{label}{bar}{rest}" if bar and label else line)
            label = ""
    return "\n".join(lines)


# ---- on a rank


class TimeLimit(BaseException):
    """The answer ran for too long. Not an Exception, which an answer might catch."""


_loaded: types.ModuleType | None = None  # the answer on this rank


def _perform(setup: tuple, scenario: Callable, args: tuple) -> Any:
    """One run on this rank."""
    global _loaded
    path, folder, limits, seed, late = setup
    rank = dist.get_rank()
    own = random.Random(1000 * seed + rank)
    torch.manual_seed(own.getrandbits(31))
    random.seed(own.getrandbits(31))
    np.random.seed(own.getrandbits(31))
    with open(f"{folder}/rank{rank}.words", "w") as words, _time_limit(*limits, words):
        if late:
            with late_network():
                return scenario(load_answer(Path(path)), *args)
        if _loaded is None:
            _loaded = load_answer(Path(path))
        return scenario(_loaded, *args)


@contextlib.contextmanager
def _time_limit(seconds: float, clock: float, words: IO[str]) -> Iterator[None]:
    """Raise TimeLimit after `seconds` of this thread's processor time; end the process if that is
    swallowed, or after `clock` seconds of wall-clock time.

    words: receives the stack of a process that ends here or by a signal such as SIGABRT.
    """

    def stop(signum, frame):
        if stopped:
            words.write("Timeout (swallowed)\n")
            words.flush()
            faulthandler.dump_traceback(words, all_threads=False)
            os._exit(1)
        left = begun + seconds - time.thread_time()
        if left > 0:  # the rest was a library's: gloo's thread may spin while a group is broken
            signal.setitimer(signal.ITIMER_PROF, max(left, 0.1), SWALLOWED)
            return
        stopped.append(True)
        raise TimeLimit(f"did not finish within {seconds:.0f} s")

    stopped, begun = [], time.thread_time()
    faulthandler.enable(words)
    faulthandler.dump_traceback_later(clock, exit=True, file=words)
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, SWALLOWED)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
