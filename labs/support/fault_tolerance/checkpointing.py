"""Given: what exercises a, c and d of lab 13 ask for, and how their check cells judge it.

a: states of all types go to the disk and back; files are damaged; processes are killed while they
save; the power is cut, the disk is full. c and d: formulas for drawn sizes; the references are
expected times in closed form, which tests/labs compares with simulated failures.
"""

import copy
import math
import os
import random
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from labs.support.fault_tolerance.killed_runs import (
    Disk,
    KillAt,
    apart,
    calls_of_a_save,
    difference,
    loaded,
)
from utils.course.assertions import Wrong, a_number, described
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions, load_answer
from utils.planner import failures
from utils.ranks.pool import PRELOADED

PRELOADED += ["labs.support.fault_tolerance.killed_runs", "safetensors.torch"]

# ---- a: checkpoints

SECONDS = 10.0  # of processor time, until a part of the check is ended
MEMORY = "/dev/shm"  # a disk that needs no time, where there is one
SERIALIZERS = (
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal",
    "torch.distributed.checkpoint", "utils.training", "utils.models", "labs.support",
)
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)
FOREIGN = {  # others' files
    "notes.txt": b"a learning rate of 3e-4\n", "model.safetensors": b"weights of yesterday",
    "best/weights.pt": b"weights of last week", "notes.tmp": b"not finished", ".hidden": b"",
}


def checkpoint(trial: Trial) -> str:
    """Judges `save` and `load` in the file."""
    trial.forbid(SERIALIZERS)
    seed = trial.new_seed()
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="checkpoint-", dir=memory) as place,
        trial.ranks(1) as group,
    ):
        for number, scenario in enumerate((
            (values,), (damages,), (kills,),
            (in_a_fork, saves_before_power_cuts), (in_a_fork, saves_on_a_full_disk),
        )):
            (folder := Path(place) / str(number)).mkdir()
            function, *forked = scenario
            group.run("saved and loaded", function, folder, seed, *forked, seconds=SECONDS)
    return (
        "killed in a save, before calls that change the folder and at bytes of files: each time\n"
        "the newest whole state; after a save the power is cut, in one the disk is full;\n"
        "damaged, missing, empty and truncated files: the state before, and a warning; all\n"
        "dtypes, views, bits and numbers; no code in a file runs; two checkpoints stay, nothing\n"
        "of killed saves, and all that is others'."
    )


def state_of(seed: int, step: int) -> dict:
    """Of a run's step: small, and different in each."""
    weights = fractions(seed + step, 48, 40, dtype=torch.float32)
    velocity = fractions(seed - step, 48, 40)
    return {"weights": weights, "velocity": velocity, "tokens": 512 * step, "loss": 1 / step}


def states_of(seed: int, last: int) -> dict[int, dict]:
    return {step: state_of(seed, step) for step in range(1, last + 1)}


def varied_state(seed: int, step: int) -> dict:
    """All dtypes, odd shapes and names, views, numbers."""
    numbers = torch.Generator().manual_seed(seed + step)

    def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=numbers)
        if dtype == torch.bool:
            return bits[..., 0] > 127
        return bits.to(torch.uint8).view(dtype).squeeze(-1)

    large = drawn(torch.float32, 400, 500)
    return {
        **{f"{dtype} {shape}": drawn(dtype, *shape) for dtype in DTYPES
           for shape in ((5, 3), (0, 3), ())},
        "transposed": large[:7, :9].t(), "every third": large[::100, 1::3], "a row": large[3],
        "a part of it": large[3, 5:20], "expanded": large[:4, :1].expand(4, 6),
        "parameter": torch.nn.Parameter(torch.randn(3, generator=numbers)),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "step": step + 1, "state": 0.1 * step, "": 7, "a/b": -3, "../up": 2**70, "sha256": True,
        "größe\n": False, "x" * 300: float("nan"), "lr": -0.0, "one": 1.0, "zero": 0,
        "__metadata__": torch.arange(3), "format": torch.ones(2),
    }


def files_in(folder: Path) -> dict[str, bytes]:
    """{name: content}."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def must_load(
    answer: Any, folder: Path, states: dict, steps: set[int], when: str, hint: str = ""
) -> int:
    """The step that is loaded, one of these."""
    try:
        found = loaded(answer, folder, states)
    except Wrong as error:
        raise Wrong(f"{when}: {error}") from None
    if found not in steps:
        right, found = max(steps), f"step {found}" if found else "None"
        raise Wrong(f"{when}: load gives {found}, not step {right}.\n{hint}".rstrip())
    return found


def values(answer: Any, place: Path, seed: int) -> None:
    """On a rank: what is saved comes back."""
    folder = place / "a new" / "folder"
    warnings.simplefilter("ignore")  # this rank ends with the check
    states = {step: varied_state(seed, step) for step in (1, 9, 10, 11, 100)}
    sizes = []  # bytes of all files
    for step, state in states.items():
        before = copy.deepcopy(state)
        answer.save(folder, state, step)
        if changed := difference(before, state):
            raise Wrong(f"after save the caller's state is not what it was: {changed}.")
        there = files_in(folder)
        must_load(answer, folder, states, {step}, f"after save for step {step}")
        if files_in(folder) != there:
            raise Wrong("load changes the folder: it only reads.")
        sizes.append(sum(map(len, there.values())))
    own = sum(v.numel() * v.element_size() for v in states[1].values() if hasattr(v, "numel"))
    if sizes[0] > 2 * own + 100_000:
        raise Wrong(
            f"a checkpoint of {own:,} bytes of tensors takes {sizes[0]:,} bytes.\n"
            "Is a view saved with all that it is a view of?"
        )
    if sizes[-1] > 2.5 * sizes[0]:
        raise Wrong(
            f"one checkpoint takes {sizes[0]:,} bytes, and after {len(states)} saves there are "
            f"{sizes[-1]:,}.\nThe newest and the one before stay: do old ones go?"
        )
    for name, value in answer.load(folder)[1].items():
        try:
            if isinstance(value, torch.Tensor):
                value.detach().zero_()
        except RuntimeError as error:
            raise Wrong(f"{name} cannot be written to when it is loaded: {error}") from None
    ran: list[str] = []
    sys.addaudithook(lambda event, _: ran.append(event) if event == "pickle.find_class" else None)
    answer.load(folder)
    if ran:
        raise Wrong(
            "load runs code that is in a file (its unpickler looks up a function): whoever can "
            "write\nthere could do anything here. What of it is data?"
        )
    nowhere = place / "nowhere"
    if (found := answer.load(nowhere)) is not None or nowhere.exists():
        raise Wrong(
            f"load of a folder that does not exist gives {described(found)}, not None, or makes it."
        )
    answer.save(str(folder), states[9], 9)  # the run has gone back
    must_load(answer, folder, states, {9}, "save for step 9, when 11 and 100 are there")


def damages(answer: Any, place: Path, seed: int) -> None:
    """On a rank: the newest checkpoint is damaged in one way after another."""
    draw, folder, states = random.Random(seed), place / "run", states_of(seed, 6)
    for step in (1, 2, 3):
        before = files_in(folder)
        answer.save(folder, states[step], step)
    good = files_in(folder)
    own = [name for name in good if good[name] != before.get(name)]
    for name in own:
        for words, content in damaged(draw, name, good[name]):
            (folder / name).unlink()
            if content is not None:
                (folder / name).write_bytes(content)
            after_damage(answer, folder, states, words, own if content is not None else [])
            (folder / name).write_bytes(good[name])
    for name in own:
        (folder / name).write_bytes(good[name][:-1])
    step = loaded(answer, folder, states)
    for again in (step + 1, step + 2):  # the run goes on from the one before
        answer.save(folder, states[again], again)
        when = f"step {step + 1} was damaged and is saved again"
        must_load(answer, folder, states, {again}, when)


def damaged(draw: random.Random, name: str, content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """(words, what is in the file then; None: it is not there)."""
    size = len(content)
    for place in sorted({0, size - 1, *(draw.randrange(size) for _ in range(20))}):
        flipped = content[place] ^ 1 << draw.randrange(8)
        yield (f"a bit of byte {place:,} of {name} is another",
               content[:place] + bytes([flipped]) + content[place + 1 :])
    yield f"{name} is missing", None
    for end in (0, size // 2, size - 1):
        yield f"{name} is truncated after {end:,} bytes", content[:end]
    yield f"{name} has a byte too many", content + b"\0"


def after_damage(answer: Any, folder: Path, states: dict, words: str, own: list[str]) -> None:
    """own: the files of the newest checkpoint, 3, one of which a warning must name."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = answer.load(folder)
        except Exception as error:
            raise Wrong(
                f"{words}: load raises {type(error).__name__}: {error}\n"
                "Nothing of step 2 is damaged, and that is asked for."
            ) from None
    if found is None:
        raise Wrong(f"{words}: load gives None, and the checkpoint of step 2 is whole.")
    if found[0] not in (2, 3):
        raise Wrong(f"{words}: load gives step {described(found[0])}; 2 is whole.")
    if wrong := difference(states[found[0]], found[1]):
        raise Wrong(f"{words}: load gives a state that was never saved: {wrong}.")
    said = " ".join(str(one.message) for one in warned)
    parts = {part for name in own for part in Path(name).parts}
    if found[0] == 2 and own and not any(part in said for part in parts):
        raise Wrong(
            f"{words}: load gives step 2, and the warning that names a damaged file of step 3\n"
            f"is {described(said) if said else 'missing'}."
        )


def kills(answer: Any, place: Path, seed: int) -> None:
    """On a rank: processes save twice, and are killed in the second save."""
    draw, file, states = random.Random(seed), Path(answer.__file__), states_of(seed, 250)
    calm, folder = place / "calm", place / "run"
    for name, content in FOREIGN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    calls = apart(calls_of_a_save, file, calm, states_of(seed, 3))
    size = max(map(len, files_in(calm).values()), default=1)
    moments = [KillAt(byte=byte) for byte in (0, 1, draw.randrange(size), size // 2, size - 1)]
    moments += [KillAt(call=n, words=words) for n, words in enumerate(calls[:12], start=1)]
    draw.shuffle(moments)
    step = 0
    for kill in moments:
        first, second = (step + turn * draw.randint(1, 3) for turn in (1, 4))
        whole = apart(saves_twice, file, folder, states, first, second, kill)
        hint = f"save had returned for step {first}, and step {second} was being saved."
        steps = {second} if whole else {first, second}
        step = must_load(answer, folder, states, steps, f"after a process was {kill}", hint)
    apart(saves_twice, file, folder, states, step + 1, step + 2, None)
    must_load(answer, folder, states, {step + 2}, f"after a process was {kill}, and two more saves")
    wanted, there = files_in(calm), files_in(folder)
    left = set(there) - set(FOREIGN)
    if len(left) > len(wanted):
        raise Wrong(
            f"after {len(moments)} kills and two saves the folder has {len(left)} files, that of "
            f"a run that was not killed {len(wanted)}.\nDoes save remove what a killed one has "
            f"left? There is {', '.join(sorted(left - set(wanted))[:3])}."
        )
    for name, content in FOREIGN.items():
        if there.get(name) != content:
            raise Wrong(f"{name} was in the folder before, and is not what it was: it is others'.")


def saves_twice(
    file: Path, folder: Path, states: dict, first: int, second: int, kill: KillAt | None
) -> bool:
    """In a fork: two steps. It is killed in the second save."""
    answer = load_answer(file)
    answer.save(folder, states[first], first)
    if kill:
        kill.arm()
    answer.save(folder, states[second], second)
    return True


def in_a_fork(answer: Any, place: Path, seed: int, scenario: Callable) -> None:
    """On a rank."""
    apart(scenario, Path(answer.__file__), place, states_of(seed, 9))


def saves_before_power_cuts(file: Path, place: Path, states: dict) -> None:
    """In a fork: saves into a folder that `save` makes, the last time of a run that has gone back;
    the power is cut after each."""
    (place / "disk").mkdir()
    disk, answer = Disk(place / "disk"), load_answer(file)
    for step in (1, 2, 9, 5):
        answer.save(place / "disk" / "new" / "run", states[step], step)
        disk.after_a_power_cut(left := place / f"after {step}")
        must_load(
            answer, left / "new" / "run", states, {step},
            f"the power is cut after save of step {step} has returned",
            "Which contents of files, or names in folders, had not been synced by then?\n"
            "A folder that save makes is a name in another one.",
        )


def saves_on_a_full_disk(file: Path, folder: Path, states: dict) -> None:
    """In a fork."""
    answer = load_answer(file)
    for step in (1, 2):
        answer.save(folder, states[step], step)
    room = max(map(len, files_in(folder).values())) // 2
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # Python ignores the signal
    try:
        answer.save(folder, states[3], 3)
        raised = False
    except Exception:
        raised = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    must_load(answer, folder, states, {2}, "on a full disk save of step 3 fails")
    if not raised:
        raise Wrong("on a full disk save returns as if it had saved: let the error be seen.")


# ---- c: how often to save

PLANNER = ("utils.planner", "labs.support")
CLOSE = 1e-9  # relative, of what has one right value
BEST, BEST_PLAN = 0.002, 0.01  # how much longer a run may take than with the best interval, plan
KINDS = ("GPU", "HBM", "host", "switch", "software", "disk")


def interval(trial: Trial) -> str:
    """Judges `between_failures`, `lost_share` and `best_interval`."""
    trial.forbid(PLANNER)
    trial.alone("as the check calls them", agrees_on_intervals, trial.new_seed())
    return (
        "the time between failures of runs with one kind of parts and with several; the lost\n"
        "share, and an interval that no other beats by more than 0.2 %, from checkpoints of a\n"
        "ten-thousandth of the time between failures to such as take three times as long."
    )


def agrees_on_intervals(answer: Any, seed: int) -> None:
    """On a rank."""
    parts = st.tuples(st.integers(0, 500), st.integers(1, 10**8), st.integers(0, 20_000))
    tables = st.lists(parts, min_size=1, max_size=6).filter(lambda one: any(n for *_, n in one))
    for_all(seed, tables, lambda table: right_between(answer, table))
    between, save, part = scale(1, 5), scale(-4, 0.5), scale(-3, 0.5)
    for_all(seed, st.tuples(part, save, part | st.just(0.0), between),
            lambda one: right_share(answer, *one))
    for_all(seed, st.tuples(save, between), lambda one: right_interval(answer, *one))


def scale(least: float, most: float) -> st.SearchStrategy:
    """Numbers from 10**least to 10**most."""
    return st.integers(round(10 * least), round(10 * most)).map(lambda tenths: 10 ** (tenths / 10))


def right_between(answer: Any, table: list[tuple[int, int, int]]) -> None:
    """table: failures, hours, parts of each kind; no parts: the run does not need that kind."""
    observed = {kind: (failed, float(hours)) for kind, (failed, hours, _) in zip(KINDS, table)}
    parts = {kind: count for kind, (*_, count) in zip(KINDS, table) if count}
    case, given = f"with observed {observed} and parts {parts}", (dict(observed), dict(parts))
    found = a_number(case, "the mean time", answer.between_failures(*given))
    if given != (observed, parts):
        raise Wrong(f"{case}: between_failures has changed what it was given to {given}.")
    rate = sum(count * failed / hours for failed, hours, count in table)
    same(case, "the mean seconds between two failures", found, 3600 / rate if rate else math.inf,
         "Failures a second add up over all parts; the times between them do not.")


def right_share(answer: Any, interval: float, save: float, restart: float, between: float) -> None:
    """interval, save, restart: in units of between."""
    given = tuple(between * part for part in (interval, save, restart)) + (between,)
    case = "with " + listed(zip(("interval", "save", "restart", "between"), given))
    found = a_number(case, "the lost share", answer.lost_share(*given))
    right = failures.stretch(*given)
    first_order = save / interval + (interval + save) / 2 + restart
    symptoms = {
        1 - 1 / failures.stretch(given[0], given[1], 0.0, between):
            "It is the share without restarts. What else does a failure cost?",
        1 - 1 / (1 + first_order):
            "It is that of a first-order formula, in which failures strike neither while a run "
            "saves nor twice.",
        right - 1: "It is how much longer the run takes. The share is of the whole time.",
    }
    words = (words for value, words in symptoms.items() if math.isclose(value, found, rel_tol=1e-6))
    asked = "What is the expected time of one interval, its checkpoint and its failures?"
    same(case, "the lost share", found, 1 - 1 / right, next(words, asked))


def right_interval(answer: Any, save: float, between: float) -> None:
    """save: in units of between."""
    save *= between
    case = f"with save {save:.4g} s and between {between:.4g} s"
    seconds = positive(case, answer.best_interval(save, between))
    around = failures.daly(save, between) * np.geomspace(0.3, 3, 200)
    least = min(failures.stretch(one, save, 0, between) for one in around)
    hint = "Try other intervals in `lost_share`: which way does it fall?"
    if math.isclose(seconds, failures.young(save, between), rel_tol=1e-3):
        hint = "It is Young's interval, which takes failures as rare. What is rare here?"
    not_longer(case, f"every {seconds:.4g} s", failures.stretch(seconds, save, 0, between), least,
               BEST, hint)


def same(case: str, what: str, found: float, right: float, hint: str) -> None:
    if not (found == right or math.isclose(found, right, rel_tol=CLOSE)):
        raise Wrong(f"{case}: {what} is {found:.9g}, and {right:.9g} is right.\n{hint}")


def positive(case: str, value: Any) -> float:
    seconds = a_number(case, "the interval", value)
    if not 0 < seconds < math.inf:
        raise Wrong(f"{case}: the interval is {seconds:g}, and should be seconds above 0.")
    return seconds


def not_longer(case: str, what: str, takes: float, least: float, margin: float, hint: str) -> None:
    if not takes <= least * (1 + margin):
        more = f"{takes / least - 1:.1%}" if takes < 1e3 * least else "many times"
        raise Wrong(f"{case}: saving {what}, the run takes {more} longer than needed.\n{hint}")


def listed(given: Any) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in given)


# ---- d: two kinds of checkpoints

MOST = 64  # checkpoints, the last of which goes to the disk
PLAN_SECONDS = 30.0  # of processor time, for one call
PLANS = [  # from, to: light; disk / between; memory / disk; restart / between
    ((0, 0), (3e-3, 0.3), (3e-3, 0.3), (0, 0)),
    ((0.97, 0.97), (3e-3, 0.3), (3e-3, 0.3), (1e-3, 0.3)),
    ((0.3, 0.95), (3e-3, 0.3), (1.2, 1.2), (0, 0)),  # memory is of no use, whatever survives
    ((0.9, 0.97), (0.4, 0.9), (3e-3, 0.1), (1, 1.5)),  # most restarts are interrupted, too
    ((0.75, 0.85), (0.1, 0.3), (0.85, 0.9), (0.02, 0.1)),  # the disk is hardly slower
    ((0.3, 0.95), (3e-3, 0.3), (3e-3, 0.3), (1e-3, 0.3)),
]


def plan(trial: Trial) -> str:
    """Judges `best_plan`."""
    trial.forbid(PLANNER)
    with trial.ranks(1) as group:
        for ranges in PLANS:
            light, disk, memory, restart = (trial.draw.uniform(*one) for one in ranges)
            between = 10 ** trial.draw.uniform(2.5, 4.5)
            given = {
                "memory": memory * disk * between, "disk": disk * between,
                "restart": restart * between, "between": between, "light": light,
            }
            case = f"with {listed(given.items())}"
            found = group.run(case, ask_for_plan, given, seconds=PLAN_SECONDS)[0]
            right_plan(case, given, found)
    return (
        "for failures of which none, nearly all and some are light, with and without a long\n"
        "restart, no other plan ends more than 1 % earlier, by the expected time of all states."
    )


def ask_for_plan(answer: Any, given: dict) -> Any:
    return answer.best_plan(**given)


def right_plan(case: str, given: dict, found: Any) -> None:
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Wrong(f"{case}: the result is {described(found)}, not (interval, every).")
    seconds, every = positive(case, found[0]), a_number(case, "every", found[1])
    if every not in range(1, MOST + 1):
        raise Wrong(f"{case}: every is {found[1]!r}, not a whole number from 1 to {MOST}.")
    takes, least = stretch_of(seconds, int(every), **given), best_stretch(**given)
    hint = (
        "What does a failure cost in the i-th interval after the last checkpoint on the disk, and\n"
        "what does one in the restart there?"
    )
    if every == 1 and given["light"] and given["memory"] < given["disk"]:
        hint = (
            "All checkpoints go to the disk. What would a cheap one be worth after a light failure?"
        )
    if given["light"] == 0:
        hint = "No failure is light here: what is a checkpoint in memory worth then?"
    if takes > 2 * least:
        hint += "\nOr was it rounding? A time below every · interval cannot be: drop such a plan."
    what = f"every {seconds:.4g} s, 1 in {every:g} to the disk"
    not_longer(case, what, takes, least, BEST_PLAN, hint)


def stretch_of(
    interval: float, every: int, memory: float, disk: float, restart: float, between: float,
    light: float,
) -> float:
    """Expected time over computing of a plan, from the linear equations of its 2 · every states:
    running from interval i on, and restarting there."""
    matrix, times = np.eye(2 * every), np.zeros(2 * every)  # running 0 …, restarting 0 …
    for number in range(every):
        length = interval + (disk if number == every - 1 else memory)
        for state, ends, to in ((number, length, number + 1), (every + number, restart, number)):
            fails = -math.expm1(-ends / between)
            times[state] = between * fails
            if to < every:
                matrix[state, to] -= 1 - fails
            matrix[state, every + number] -= fails * light
            matrix[state, every] -= fails * (1 - light)
    try:
        found = np.linalg.solve(matrix, times)[0] / (every * interval)
    except np.linalg.LinAlgError:  # it never gets there
        return math.inf
    return found if 1 <= found < 1e9 else math.inf


def best_stretch(memory: float, disk: float, restart: float, between: float, light: float) -> float:
    """That of the best plan."""
    given, found, worse = (memory, disk, restart, between, light), math.inf, 0
    for every in range(1, MOST + 1):
        base = failures.young((memory * (every - 1) + disk) / every, between)
        least = min(stretch_of(base * x, every, *given) for x in np.geomspace(0.25, 6, 24))
        worse = 0 if least < found else worse + 1
        found = min(found, least)
        if worse > 3:  # it falls and then rises
            break
    return found
