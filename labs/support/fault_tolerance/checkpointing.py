"""Given: the contracts of exercises a, c and d of lab 13, and the judges behind their check cells.

a: states of all types are saved and loaded; files are damaged; processes are killed while saving;
the power is cut. c and d: formulas are checked for drawn sizes; the references are expected times
in closed form, which tests/labs compares with simulated failures.
"""

import math
import os
import random
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from utils.course.assertions import Wrong, a_number, bitwise_equal, described
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions, load_answer
from utils.planner import failures
from utils.ranks.pool import PRELOADED

PRELOADED.append("safetensors.torch")

# ---- a: checkpoints

SECONDS = 10  # of CPU time, after which a part of the check is ended
MEMORY = "/dev/shm"  # a disk that takes no time, if there is one
SERIALIZERS = (
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal",
    "torch.distributed.checkpoint", "utils.training", "utils.models", "labs.support",
)
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)
FOREIGN = {  # files of others
    "notes.txt": b"a learning rate of 3e-4\n", "notes.tmp": b"not finished",
    "best/weights.pt": b"weights of last week",
}


def checkpoint(trial: Trial) -> str:
    """Judge `save` and `load` in the file."""
    trial.forbid(SERIALIZERS)
    seed, memory = trial.new_seed(), MEMORY if os.access(MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="checkpoint-", dir=memory) as place,
        trial.ranks(1) as group,
    ):
        for words, scenario in (
            ("saved and loaded", values), ("damaged files of the newest checkpoint", damages),
            ("killed in a save, a full disk", kills), ("power cuts", power_cuts),
        ):
            (folder := Path(place) / scenario.__name__).mkdir()
            group.run(words, scenario, folder, seed, seconds=SECONDS)
    return (
        "killed during a save, at several bytes of a file, on a full disk, or after a power cut,\n"
        "load gives the newest complete state; with damaged, missing, empty or truncated files\n"
        "the previous one, and a warning; all dtypes, views, bits and numbers; no code in a file\n"
        "runs; two checkpoints stay, nothing of killed saves, and all files of others."
    )


def states_of(seed: int, last: int) -> dict[int, dict]:
    """Small states by step, from 1 on, different in each."""
    return {
        step: {"weights": fractions(seed + step, 48, 40), "tokens": 512 * step, "loss": 1 / step}
        for step in range(1, last + 1)
    }


def varied_state(seed: int, step: int) -> dict:
    """A state with all dtypes, odd shapes and names, views and numbers."""
    large = fractions(seed + step, 400, 500)
    return {
        **{f"{dtype} {shape}": fractions(seed + step, *shape).mul(9).abs().to(dtype)
           for dtype in DTYPES for shape in ((5, 3), (0, 3), ())},
        "transposed": large[:7, :9].t(), "a row": large[3], "a part of it": large[3, 5:20],
        "expanded": large[:4, :1].expand(4, 6), "parameter": torch.nn.Parameter(large[5].clone()),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "step": step + 1, "state": 0.1 * step, "": 7, "a/b": -3, "large": 2**70, "done": True,
        "größe\n": False, "loss": float("nan"), "lr": -0.0, "one": 1.0, "zero": 0,
    }


def files_in(folder: Path) -> dict[str, bytes]:
    """{name: content}."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def right_one(found: Any, states: dict, steps: set[int], when: str, hint: str = "") -> int:
    """Return the step that `load` returns, which must be one of these with its state; or raise
    Wrong."""
    if found is None or found[0] not in steps:
        gives, right = f"step {found[0]}" if found else "None", " or ".join(map(str, sorted(steps)))
        raise Wrong(f"{when}: load returns {gives}, not step {right}.\n{hint}".rstrip())
    step, state = found
    for name in sorted(states[step].keys() | state.keys()):
        was, now = states[step].get(name), state.get(name)
        if isinstance(was, torch.Tensor) and isinstance(now, torch.Tensor):
            equal = bitwise_equal(was, now)
        else:
            equal = type(was) is type(now) and repr(was) == repr(now)
        if not equal:
            raise Wrong(
                f"{when}: load returns a state that was never saved: {name!r} is\n"
                f"{described(now)}, but {described(was)} was saved."
            )
    return step


def values(answer: Any, place: Path, seed: int) -> None:
    """On a rank: loading returns what was saved."""
    warnings.simplefilter("ignore")  # this rank ends with the check
    folder = place / "a new" / "folder"
    for step in (1, 9, 10, 11, 100, 9):  # at the end the run has gone back
        answer.save(folder, varied_state(seed, step), step)
        state = varied_state(seed, step)
        right_one(answer.load(folder), {step: state}, {step}, f"after save for step {step}")
        takes = sum(map(len, files_in(folder).values()))
        own = sum(v.numel() * v.element_size() for v in state.values() if hasattr(v, "numel"))
        if takes > 4 * own + 200_000:
            raise Wrong(
                f"two checkpoints of {own:,} bytes of tensors take {takes:,} bytes.\n"
                "Is a view saved together with its whole storage?"
            )
    if (found := answer.load(place / "nowhere")) is not None:
        raise Wrong(f"load of a folder that does not exist returns {described(found)}, not None.")
    ran: list[str] = []
    sys.addaudithook(lambda event, _: ran.append(event) if event == "pickle.find_class" else None)
    answer.load(folder)
    if ran:
        raise Wrong(
            "load runs code from a file (its unpickler looks up a function): anyone who can write\n"
            "the file could run anything here. Which part of it is only data?"
        )


def damages(answer: Any, folder: Path, seed: int) -> None:
    """On a rank: the newest checkpoint, 3, is damaged in several ways in turn; a warning must name
    one of its files."""
    draw, states, good = random.Random(seed), states_of(seed, 3), {}
    for step in states:
        before = good
        answer.save(folder, states[step], step)
        good = files_in(folder)
    own = [name for name in good if good[name] != before.get(name)]
    parts = {part for name in own for part in Path(name).parts}
    for name in own:
        for words, content in damaged(draw, good[name]):
            when = f"{name} {words}"
            (folder / name).unlink()
            if content is not None:
                (folder / name).write_bytes(content)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                found = answer.load(folder)
            said = " ".join(str(one.message) for one in warned)
            step = right_one(found, states, {2, 3}, when, "Nothing of step 2 is damaged.")
            if step == 2 and content is not None and not any(part in said for part in parts):
                raise Wrong(
                    f"{when}: load returns step 2, but the warning, which should name a damaged\n"
                    f"file of step 3, is {described(said) if said else 'missing'}."
                )
            (folder / name).write_bytes(good[name])
    for name in own:
        (folder / name).write_bytes(good[name][:-1])
    answer.save(folder, states[3], 3)  # the run continues from the previous one
    right_one(answer.load(folder), states, {3}, "step 3 was damaged, and is saved again")


def damaged(draw: random.Random, content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """(description, content of the damaged file; None: the file is missing)."""
    size = len(content)
    for place in sorted({0, size - 1, *(draw.randrange(size) for _ in range(10))}):
        flipped = bytes([content[place] ^ 1 << draw.randrange(8)])
        yield f"has a wrong byte {place:,}", content[:place] + flipped + content[place + 1 :]
    yield "is missing", None
    for end in (0, size // 2, size - 1):
        yield f"is truncated after {end:,} bytes", content[:end]


def kills(answer: Any, folder: Path, seed: int) -> None:
    """On a rank: processes save twice, and are killed during the second save."""
    states, file = states_of(seed, 40), Path(answer.__file__)
    for name, content in FOREIGN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for step in (1, 2):
        answer.save(folder, states[step], step)
    usual = files_in(folder)
    size = max(len(usual[name]) for name in usual.keys() - FOREIGN.keys())
    for byte, full in ((0, 0), (1, 0), (size // 4, 0), (size // 2, 1), (size - 1, 0)):
        when = f"{'the disk is full' if full else 'killed'} when a file has {byte:,} bytes"
        first, second = step + 2, step + 4
        ended = killed_in_a_save(file, folder, states, first, second, byte, full)
        if ended == -signal.SIGALRM or (ended == 1 and not full):  # repeat it here, for the error
            answer.save(folder, states[first], first)
        hint = f"save had returned for step {first}, and step {second} was being saved."
        steps = {first, second} if ended else {second}
        step = right_one(answer.load(folder), states, steps, when, hint)
    for again in (step + 3, step + 5):
        answer.save(folder, states[again], again)
    right_one(answer.load(folder), states, {again}, f"{when}, and two more saves")
    there = files_in(folder)
    if len(there) > len(usual):
        raise Wrong(
            f"after some kills and saves the folder has {len(there)} files, but {len(usual)} after "
            "the first two saves:\ndoes save remove old files, and those of killed saves? There is "
            f"{', '.join(sorted(there.keys() - usual.keys())[:3])}."
        )
    for name, content in FOREIGN.items():
        if there.get(name) != content:
            raise Wrong(f"{name} was in the folder before, is not yours, and has changed.")


def killed_in_a_save(
    file: Path, folder: Path, states: dict, first: int, second: int, byte: int, full: int
) -> int:
    """Save two steps in a fork of this process. In the second, a file that would exceed `byte`
    bytes kills it, or the disk is full. Returns 0: neither; 1: it fails; else minus the signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child does not use them
        pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        signal.alarm(SECONDS)
        answer = load_answer(file)
        answer.save(folder, states[first], first)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN if full else signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (byte, byte))
        answer.save(folder, states[second], second)
        os._exit(0)
    finally:
        os._exit(1)


def power_cuts(answer: Any, place: Path, seed: int) -> None:
    """On a rank that is not used again: save into a folder that `save` creates, finally in a run
    that has gone back; the power is cut after each save."""
    states, folder = states_of(seed, 9), Path("new") / "run"
    (place / "disk").mkdir()
    disk, answer = Disk(place / "disk"), load_answer(Path(answer.__file__))
    for step in (1, 2, 9, 5):
        answer.save(place / "disk" / folder, states[step], step)
        disk.after_a_power_cut(left := place / f"after {step}")
        right_one(
            answer.load(left / folder), states, {step},
            f"the power is cut after save of step {step} has returned",
            "Which contents of files, or names in folders, had not been synced by then?\n"
            "A folder that save creates is a name in its parent.",
        )


class Disk:
    """What is certain to be on the disk below `folder`, recorded in this process until it ends: of
    a file the content when it was last synced, of a folder the names it then held."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._certain: dict[int, bytes | dict[str, int]] = {}  # by inode; names with their inodes
        os.fsync = os.fdatasync = self._fsync
        os.sync = self._sync
        self._sync()

    def after_a_power_cut(self, place: Path, inode: int | None = None) -> None:
        """Create in `place` what is left; files that were not synced are empty."""
        left = self._certain.get(inode or self._folder.stat().st_ino, b"")
        if isinstance(left, bytes):
            place.write_bytes(left)
            return
        place.mkdir()
        for name, number in left.items():
            self.after_a_power_cut(place / name, number)

    def _fsync(self, file: Any) -> None:
        # never closed, so that the inode number is not reused
        opened = os.dup(file if isinstance(file, int) else file.fileno())
        here = Path(f"/proc/self/fd/{opened}")
        names = {one.name: one.inode() for one in os.scandir(opened)} if here.is_dir() else None
        self._certain[os.fstat(opened).st_ino] = here.read_bytes() if names is None else names

    def _sync(self) -> None:
        for path in (self._folder, *self._folder.rglob("*")):
            self._fsync(os.open(path, os.O_RDONLY))


# ---- c: how often to save

PLANNER = ("utils.planner", "labs.support")
BEST, BEST_PLAN = 0.002, 0.01  # fraction by which a run may be longer than with the best one
KINDS = ("GPU", "HBM", "host", "switch", "software", "disk")


def interval(trial: Trial) -> str:
    """Judge `between_failures`, `lost_share` and `best_interval`."""
    trial.forbid(PLANNER)
    trial.alone("as the check calls them", agrees_on_intervals, trial.new_seed())
    return (
        "the time between failures with one kind of part or several; the lost share, and an\n"
        "interval that no other beats by more than 0.2 %, for checkpoints that take from a\n"
        "ten-thousandth of the time between failures to three times as long."
    )


def agrees_on_intervals(answer: Any, seed: int) -> None:
    """On a rank: compare all three functions with the references."""
    counts = st.tuples(st.integers(0, 500), st.integers(1, 10**8), st.integers(1, 20_000))
    tables = st.dictionaries(st.sampled_from(KINDS), counts, min_size=1)
    for_all(seed, tables, lambda table: right_between(answer, table), 60)
    between, save, part = scale(1, 5), scale(-4, 0.5), scale(-3, 0.5)
    for_all(seed, st.tuples(part, save, part | st.just(0.0), between),
            lambda one: right_share(answer, *one), 60)
    for_all(seed, st.tuples(save, between), lambda one: right_interval(answer, *one), 60)


def scale(least: float, most: float) -> st.SearchStrategy:
    """Numbers from 10**least to 10**most."""
    return st.integers(round(10 * least), round(10 * most)).map(lambda tenths: 10 ** (tenths / 10))


def right_between(answer: Any, table: dict[str, tuple[int, int, int]]) -> None:
    """Check one table of (failures, hours, parts) by kind."""
    observed = {kind: (failed, float(hours)) for kind, (failed, hours, _) in table.items()}
    observed["not needed"] = (7, 1000.0)
    parts = {kind: count for kind, (*_, count) in table.items()}
    rate = sum(count * failed / hours for failed, hours, count in table.values())
    same(f"with observed {observed} and parts {parts}", "the mean seconds between two failures",
         answer.between_failures(observed, parts), 3600 / rate if rate else math.inf,
         "Failures per second add up over all parts; the times between them do not.")


def right_share(answer: Any, interval: float, save: float, restart: float, between: float) -> None:
    """interval, save, restart: in units of between."""
    given = tuple(between * part for part in (interval, save, restart)) + (between,)
    case = "with " + listed(zip(("interval", "save", "restart", "between"), given))
    found, right = answer.lost_share(*given), failures.stretch(*given)
    hint = "What is the expected time of one interval, its checkpoint and its failures?"
    for wrong, words in (
        (1 - 1 / (1 + save / interval + (interval + save) / 2 + restart),
         "It is that of a first-order formula, in which failures strike neither during a save nor "
         "twice."),
        (right - 1, "It is how much longer the run takes. The share is of the total time."),
    ):
        if math.isclose(wrong, found, rel_tol=1e-6):
            hint = words
    same(case, "the lost share", found, 1 - 1 / right, hint)


def right_interval(answer: Any, save: float, between: float) -> None:
    """save: in units of between."""
    save *= between
    case = f"with save {save:.4g} s and between {between:.4g} s"
    seconds = a_number(case, "the interval", answer.best_interval(save, between))
    around = failures.daly(save, between) * np.geomspace(0.3, 3, 200)
    least = min(failures.stretch(one, save, 0, between) for one in around)
    hint = "Try other intervals in `lost_share`: in which direction does it fall?"
    if math.isclose(seconds, failures.young(save, between), rel_tol=1e-3):
        hint = "It is Young's interval, which assumes that failures are rare. Are they here?"
    not_longer(case, f"every {seconds:.4g} s", failures.stretch(seconds, save, 0, between), least,
               BEST, hint)


def same(case: str, what: str, found: Any, right: float, hint: str) -> None:
    found = a_number(case, what, found)
    if not (found == right or math.isclose(found, right, rel_tol=1e-9)):
        raise Wrong(f"{case}: {what} is {found:.9g}, and {right:.9g} is right.\n{hint}")


def not_longer(case: str, what: str, takes: float, least: float, margin: float, hint: str) -> None:
    if not takes <= least * (1 + margin):
        more = f"{takes / least - 1:.1%}" if takes < 1e3 * least else "many times"
        raise Wrong(f"{case}: saving {what}, the run takes {more} longer than needed.\n{hint}")


def listed(given: Any) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in given)


# ---- d: two kinds of checkpoints

MOST = 64  # checkpoints, the last of which goes to disk
PLAN_SECONDS = 20.0  # of CPU time per call
PLANS = [  # light; disk, memory, restart in units of `between`; the best plan's stretch
    (0.0, 0.05, 0.005, 0.0, 1.3963),
    (0.97, 0.05, 0.005, 0.05, 1.2301),
    (0.95, 0.6, 0.02, 1.2, 7.0005),  # most restarts are interrupted too
    (0.8, 0.2, 0.175, 0.05, 2.1314),  # the disk is hardly slower
    (0.6, 0.03, 0.002, 0.03, 1.2691),
]


def plan(trial: Trial) -> str:
    """Judge `best_plan`."""
    trial.forbid(PLANNER)
    with trial.ranks(1) as group:
        for light, *parts, least in PLANS:
            between = 10 ** trial.draw.uniform(2.5, 4.5)
            times = dict(zip(("disk", "memory", "restart"), (between * part for part in parts)))
            given = times | {"between": between, "light": light}
            case = f"with {listed(given.items())}"
            group.run(case, right_plan, case, given, least, seconds=PLAN_SECONDS)
    return (
        "whether none, some or nearly all failures are light, with and without a long restart, no\n"
        "other plan ends more than 1 % earlier, by the expected time over all states."
    )


def right_plan(answer: Any, case: str, given: dict, least: float) -> None:
    """On a rank: check one plan."""
    seconds, every = answer.best_plan(**given)
    if every not in range(1, MOST + 1):
        raise Wrong(f"{case}: every is {every!r}, not an integer from 1 to {MOST}.")
    takes = stretch_of(seconds, int(every), **given)
    hint = (
        "What does a failure cost in the i-th interval after the last checkpoint on disk, and\n"
        "what does one cost during the restart there?"
    )
    if every == 1 and given["light"]:
        hint = (
            "All checkpoints go to disk. What would an inexpensive one be worth after a light "
            "failure?"
        )
    if takes > 2 * least:
        hint += "\nOr was it rounding? A time below every · interval is impossible: drop that plan."
    what = f"every {seconds:.4g} s, 1 in {every:g} to disk"
    not_longer(case, what, takes, least, BEST_PLAN, hint)


def stretch_of(
    interval: float, every: int, memory: float, disk: float, restart: float, between: float,
    light: float,
) -> float:
    """Expected time of a plan divided by its computing time, from the linear equations of its 2 ·
    every states: running from interval i on, and restarting there."""
    lengths = np.append(np.full(every - 1, interval + memory), interval + disk)
    whole, up, one = np.exp(-lengths / between), math.exp(-restart / between), np.eye(every)
    back = light * one  # from interval i to restarting in interval j
    back[:, 0] += 1 - light
    matrix = np.block([
        [one - np.diag(whole[:-1], 1), (whole - 1)[:, None] * back],
        [-up * one, one - (1 - up) * back],
    ])
    times = between * np.append(1 - whole, np.full(every, 1 - up))
    try:
        found = np.linalg.solve(matrix, times)[0] / (every * interval)
    except np.linalg.LinAlgError:  # the run never ends
        return math.inf
    return found if 1 <= found < 1e9 else math.inf
