"""What a lab's check cell calls: it tells how far your answer is, and never raises.

    check("01b ring all-reduce", check_messages.ring, "ring.py")

    [ ] 01b ring all-reduce: not started. Your task: …
    [x] 01b ring all-reduce: … what is wrong, and where to look
    [ok] 01b ring all-reduce: … what was looked at

A judge is a function of the answer's file. It loads the file afresh, lets real ranks run it, looks
at values, messages and bytes, and raises `Wrong` with the symptom or returns what it has seen
(`NotHere`: it cannot be run on this machine). Right and wrong are remembered for the progress
report (`utils/course/progress.py`).
"""

import contextlib
import importlib.util
import linecache
import re
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from utils.course import record
from utils.ranks import RankError, Ranks

HANG = 5.0  # seconds until a collective counts as hanging
TOO_LONG = 15.0  # seconds until an answer that does not communicate counts as an endless loop


class Wrong(Exception):
    """An answer is wrong. The message names the symptom and where to look."""


class NotHere(Exception):
    """This machine cannot run what a check needs. The message says what is missing, and where it
    would be found."""


def check(name: str, judge: Callable[[Path], str], file: str | Path) -> None:
    """Prints `[ ]`, `[x]` or `[ok]` for the answer in `file`, and remembers the result.

    name: of the exercise, unique in the course; it begins with the lab's number.
    judge: called with the file's path; returns what it has seen, or raises.
    """
    path = Path(file).resolve()
    linecache.checkcache(str(path))  # an error must show the lines of today
    try:
        compile_answer(path)
        seen = judge(path)
    except NotImplementedError as error:
        _say("[ ]", name, f"not started. Your task: {error}")
        return
    except NotHere as error:
        _say("[ ]", name, str(error))
        return
    except RankError as error:
        task = re.search(r"NotImplementedError: (.*)", str(error))
        if task:
            _say("[ ]", name, f"not started. Your task: {task[1]}")
            return
        passed, text = False, _of_interest(str(error))
    except Wrong as error:
        passed, text = False, str(error)
    except SyntaxError as error:
        passed, text = False, f"{path.name} line {error.lineno} is no Python: {error.msg}"
    except FileNotFoundError as error:
        passed, text = False, f"there is no file {error.filename}"
    except Exception as error:
        passed, text = False, f"{type(error).__name__}{_line_of(error, path)}: {error}"
    else:
        passed, text = True, seen
    _say("[ok]" if passed else "[x]", name, text)
    with contextlib.suppress(record.RecordError):  # a check must not fail for a read-only folder
        record.change(lambda content: content["checks"].update({name: passed}))


def on_ranks(size: int, path: Path, scenario: Callable, *args: Any, hang: str = "") -> list:
    """`scenario(answer, *args)` on `size` fresh ranks, `answer` the module loaded from `path`.

    Returns the results by rank. Raises Wrong, with each rank's place and the advice `hang`, when a
    collective does not complete or the answer does not come to an end.
    """
    cloudpickle.register_pickle_by_value(sys.modules[scenario.__module__])
    with Ranks(size, device="cpu", timeout=HANG) as ranks:
        try:
            return ranks.run(_run_scenario, str(path), scenario, args, TOO_LONG)
        except RankError as error:
            text = _of_interest(str(error))
            if "did not complete" in text:
                raise Wrong(f"with {size} ranks: {text}\n{hang}") from None
            if "TimeLimit" in text:
                raise Wrong(f"with {size} ranks: {text}") from None
            raise


def compile_answer(path: Path) -> types.CodeType:
    """The code of the file as it is now, whatever was imported from it before."""
    return compile(path.read_text(encoding="utf-8"), str(path), "exec")


def load_answer(path: Path) -> types.ModuleType:
    """A new module made from the file; files beside it can be imported by it."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"answer_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile_answer(path), module.__dict__)
    return module


class TimeLimit(Exception):
    """The answer ran for too long."""


def _run_scenario(path: str, scenario: Callable, args: tuple, seconds: float):
    """On a rank: load the answer and run the scenario on it, for so many seconds at most."""
    with _time_limit(seconds):
        return scenario(load_answer(Path(path)), *args)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(signum, frame):
        raise TimeLimit(f"no end after {seconds:.0f} s: an endless loop?")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _say(mark: str, name: str, text: str) -> None:
    """The mark and the first line; further lines are set in below it."""
    first, *more = text.strip().splitlines() or [""]
    print("\n".join([f"{mark} {name}: {first}", *(f"    {line}" for line in more)]))


def _of_interest(text: str) -> str:
    """A RankError without the judge's own lines, and without what only the ranks' owner needs."""
    lines, label = [], ""
    for line in text.splitlines():
        head, bar, rest = line.partition("│")
        if bar and re.match(r" (checks|traffic|scenarios|check_\w+)\.py:\d+: ", rest):
            label = head if head.strip() else label  # of the rank: for the next line
        elif not re.match(r"The (other )?ranks (stay|were)", line):
            lines.append(f"{label}{bar}{rest}" if bar and label else line)
            label = ""
    return "\n".join(lines)


def _line_of(error: Exception, path: Path) -> str:
    """ " in ring.py line 12": the last line of the answer that took part."""
    trace, line = error.__traceback__, None
    while trace:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" in {path.name} line {line}"
