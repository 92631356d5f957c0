"""The function that a lab's check cell calls: it reports on your answer, and never raises.

    check("01b ring all-reduce", contracts.ring, "ring.py")

    [ ] 01b ring all-reduce: not started. Your task: …
    [x] 01b ring all-reduce: … what is wrong, and where to look
    [ok] 01b ring all-reduce: … what was tested

A judge is a function of a `Trial` (`utils/course/runner.py`): it runs the answer on real ranks, on
cases drawn from a seed, and either raises `Wrong` with the symptom or returns what it tested
(`NotHere`: this machine cannot run it). The seed is printed: `check(…, seed=…)` draws the same
cases again. The result is recorded for the progress report (`utils/course/progress.py`).
"""

import contextlib
import linecache
import os
import random
from collections.abc import Callable
from pathlib import Path

from utils.course import ledger
from utils.course.assertions import NotHere, Wrong
from utils.course.runner import Trial, compile_answer

SEED = "KINTSUGI_SEED"  # environment variable: the seed if a call gives none


def check(
    name: str, judge: Callable[[Trial], str], file: str | Path, seed: int | None = None
) -> None:
    """Print `[ ]`, `[x]` or `[ok]` for the answer in `file`, and record the result.

    name: of the exercise, unique in the workshop; it begins with the lab's number.
    judge: called with a `Trial` of the file; returns what it tested, or raises.
    seed: of the cases; None draws one.
    """
    path = Path(file).resolve()
    linecache.checkcache(str(path))  # an error must show the current lines
    if seed is None:
        seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(10_000))
    trial = Trial(path, seed)
    try:
        compile_answer(path)
        seen = judge(trial)
    except NotImplementedError as error:
        _say("[ ]", name, f"not started. Your task: {error}")
        return
    except NotHere as error:
        _say("[ ]", name, str(error))
        return
    except Wrong as error:
        again = f"\nThe same cases again: check(…, seed={seed})" if trial.drawn else ""
        passed, text = False, f"{error}{again}"
    except SyntaxError as error:
        passed, text = False, f"{path.name} line {error.lineno} is not valid Python: {error.msg}"
    except FileNotFoundError as error:
        passed, text = False, f"there is no file {error.filename}"
    except Exception as error:
        passed, text = False, f"{type(error).__name__}{_line_of(error, path)}: {error}"
    else:
        passed, text = True, seen + f"\nThe cases were drawn from seed {seed}." * trial.drawn
    _say("[ok]" if passed else "[x]", name, text)
    symptom = text.strip().partition("\n")[0]
    with contextlib.suppress(ledger.LedgerError):  # a check must not fail for a read-only folder
        ledger.change(lambda content: ledger.note_check(content, name, passed, symptom))
    if not passed and ledger.alias():
        print("    Stuck? from utils.course import ask_for_help; ask_for_help()")


def _say(mark: str, name: str, text: str) -> None:
    """Print the mark and the first line; further lines are indented below it."""
    first, *more = text.strip().splitlines() or [""]
    print("\n".join([f"{mark} {name}: {first}", *(f"    {line}" for line in more)]))


def _line_of(error: Exception, path: Path) -> str:
    """ " in ring.py line 12": the answer's last line in the traceback."""
    trace, line = error.__traceback__, None
    while trace:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" in {path.name} line {line}"
