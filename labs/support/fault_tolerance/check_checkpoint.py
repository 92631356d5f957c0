"""Given: what the check of exercise a looks at.

Your `save` and `load` run in processes of their own. States of all types go to the disk and back;
files are damaged, byte by byte; a training loop is killed 50 times and goes on; the power is cut at
every call, and what was not synced is gone.
"""

import os
import random
import resource
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from labs.support.fault_tolerance import lives
from labs.support.fault_tolerance.lives import all_states, apart, copied, difference, loaded
from labs.support.fault_tolerance.power import FILLS, Cuts
from utils.course.assertions import Wrong, described
from utils.course.runner import Trial, load_answer
from utils.ranks.pool import PRELOADED

PRELOADED += ["labs.support.fault_tolerance.lives", "safetensors.torch"]

SECONDS = 60.0  # until a part of the check is ended
KILLS = 50
MEMORY = "/dev/shm"  # a disk that needs no time, where there is one
PLACES = 40  # in each file at which a byte is damaged
RUNS = ("pickle.find_class", "exec")  # audit events
LIBRARY = (
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal",
    "torch.distributed.checkpoint", "utils.training", "utils.models", "labs.support",
)
FOREIGN = {
    "notes.txt": b"a learning rate of 3e-4\n", "model.safetensors": b"weights of yesterday",
    "best/weights.pt": b"weights of last week", "notes.tmp": b"not finished", ".hidden": b"",
}


def checkpoint(trial: Trial) -> str:
    """Judges `save` and `load` in the file."""
    trial.forbid(LIBRARY)
    seed = trial.new_seed()
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="checkpoint-", dir=memory) as place,
        trial.ranks(1) as group,
    ):
        for name, scenario in (
            ("values", _values), ("damages", _damages), ("cuts", _cuts), ("kills", _kills),
        ):
            (Path(place) / name).mkdir()
            group.run("saved and loaded", scenario, f"{place}/{name}", seed, seconds=SECONDS)
    return (
        f"{KILLS} kills, before calls, at bytes of files and at random times: each time the\n"
        "newest whole state, and in the end that of an undisturbed run; power cuts at every\n"
        "call of a save, and a disk that is full; damaged, missing, empty and cut files: the\n"
        "state before, and a warning; all dtypes, views, bits and numbers; no code runs that\n"
        "stands in a file; two checkpoints stay, nothing of killed saves, and all that is others'."
    )


# ---- 1. values


def _values(answer: Any, place: str, seed: int) -> None:
    """On a rank: what is saved comes back."""
    folder = Path(place) / "a new" / "folder"
    warnings.simplefilter("ignore")  # this rank ends with the check
    states = {step: _state(seed, step) for step in (1, 9, 10, 11, 100)}
    sizes = []  # bytes of all files
    for step, state in states.items():
        before = copied(state)
        answer.save(folder, state, step)
        changed = difference(before, state)
        if changed:
            raise Wrong(f"after save the caller's state is not what it was: {changed}.")
        there = _files(folder)
        found, got = loaded(answer, folder, states)
        if found != step:
            raise Wrong(f"load gives step {found} after save for step {step}.")
        if _files(folder) != there:
            raise Wrong("load changes the folder: it only reads.")
        sizes.append(sum(map(len, there.values())))
        if step == 1:
            _right_size(state, sizes[0])
        for name, value in got.items():
            try:
                if isinstance(value, torch.Tensor):
                    value.detach().zero_()
            except RuntimeError as error:
                raise Wrong(f"{name} cannot be written to when it is loaded: {error}") from None
        loaded(answer, folder, states)
    if sizes[-1] > 2.5 * sizes[0]:
        raise Wrong(
            f"one checkpoint takes {sizes[0]:,} bytes, and after {len(states)} saves there are "
            f"{sizes[-1]:,}.\nThe newest and the one before stay: do old ones go?"
        )
    nowhere = Path(place) / "nowhere"
    _none(answer, nowhere)
    if nowhere.exists():
        raise Wrong("load makes a folder where there is none: it only reads.")
    answer.save(str(folder), states[9], 9)  # the run has gone back
    found, _ = loaded(answer, folder, states)
    if found != 9:
        raise Wrong(f"save for step 9, when 11 and 100 are there: load gives step {found}, not 9.")


def _right_size(state: dict, size: int) -> None:
    """Of one checkpoint."""
    own = sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, torch.Tensor))
    if size > 2 * own + 100_000:
        raise Wrong(
            f"a checkpoint of {own:,} bytes of tensors takes {size:,} bytes.\n"
            "Is a view saved with all that it is a view of?"
        )


def _none(answer: Any, folder: Path) -> None:
    if (found := answer.load(folder)) is not None:
        raise Wrong(f"load of a folder without checkpoints gives {described(found)}, not None.")


def _state(seed: int, step: int) -> dict:
    """All dtypes, odd shapes and names, numbers."""
    draw = random.Random(f"{seed} {step}")
    numbers = torch.Generator().manual_seed(draw.getrandbits(31))

    def drawn(dtype, *shape):
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=numbers)
        if dtype == torch.bool:
            return bits[..., 0] > 127
        return bits.to(torch.uint8).view(dtype).squeeze(-1)

    floats = torch.float64, torch.float32, torch.float16, torch.bfloat16
    whole = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool
    state: dict = {f"{dtype} {n}": drawn(dtype, n, 3) for dtype in floats + whole for n in (5, 0)}
    state |= {f"0-dim {dtype}": drawn(dtype) for dtype in floats + whole}
    large = drawn(torch.float32, 400, 500)
    state |= {
        "transposed": large[:7, :9].t(), "every third": large[::100, 1::3], "a row": large[3],
        "the same row": large[3], "a part of it": large[3, 5:20],
        "expanded": large[:4, :1].expand(4, 6),
        "parameter": torch.nn.Parameter(torch.randn(3, generator=numbers)),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    }
    state |= {
        "step": draw.randrange(1000), "state": 0.1 + draw.random(), "": 7, "a/b": -3,
        "../up": 2**70, "__metadata__": torch.arange(3), "sha256": True, "größe\n": False,
        "x" * 300: float("nan"), "lr": -0.0, "one": 1.0, "zero": 0, "loss": float("inf"),
        "format": torch.ones(2),
    }
    names = list(state)
    draw.shuffle(names)
    return {name: state[name] for name in names}


# ---- 2. damages


def _damages(answer: Any, place: str, seed: int) -> None:
    """On a rank: the newest checkpoint is damaged in one way after the other."""
    warnings.simplefilter("ignore")
    draw = random.Random(seed)
    folder = Path(place) / "run"
    states = all_states(seed, 8)
    folder.mkdir()
    foreign = _foreign(folder)
    _none(answer, folder)
    for last in (2, 5):
        for step in range(1 if last == 2 else 3, last + 1):
            before = _files(folder)
            answer.save(folder, copied(states[step]), step)
        good = _files(folder)
        own = [name for name in good if good[name] != before.get(name) and name not in foreign]
        for words, content in _damaged(draw, good, own, last == 2, before):
            _write(folder, good, content)
            named = own if None not in content.values() else []
            _after_damage(answer, folder, states, last, named, words)
        _write(folder, {**good, **content}, good)
    _goes_back(answer, folder, states, own)
    for name, content in foreign.items():
        if _files(folder).get(name) != content:
            raise Wrong(f"{name} was in the folder before, and is not what it was: it is others'.")


def _damaged(
    draw: random.Random, good: dict, own: list[str], first: bool, before: dict
) -> Iterator[tuple[str, dict]]:
    """(words, the files that are there then)."""
    for name in own:
        content = good[name]
        if isinstance(content, str):
            yield f"the link {name} is gone", _but(good, name, None)
            continue
        size = len(content)
        places = {0, size - 1, *(draw.randrange(size) for _ in range(PLACES))} if size else ()
        for place in sorted(places):
            flipped = bytearray(content)
            flipped[place] ^= 1 << draw.randrange(8)
            yield f"a bit of byte {place:,} of {name} is another", _but(good, name, bytes(flipped))
        yield f"{name} is missing", _but(good, name, None)
        for end in {0, 1, size // 2, size - 1} if size else ():
            yield f"{name} is cut after {end:,} bytes", _but(good, name, content[:end])
        yield f"{name} has a byte too many", _but(good, name, content + b"\0")
        if size > 100:
            begin = draw.randrange(size - 64)
            zeros = content[:begin] + bytes(64) + content[begin + 64 :]
            yield f"64 bytes of {name} are zeros", _but(good, name, zeros)
            one, other = _unequal(draw, content)
            swapped = bytearray(content)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            yield f"two bytes of {name} have changed places", _but(good, name, bytes(swapped))
    if first:
        new = [name for name in own if name not in before]
        for words, content in (("gone", None), ("empty", b"")):
            changed = {name: content for name in new if isinstance(good[name], bytes)}
            yield f"all new files of the last save are {words}", {**good, **changed}


def _unequal(draw: random.Random, content: bytes) -> tuple[int, int]:
    """Two places whose bytes differ."""
    one = draw.randrange(len(content))
    others = [place for place, byte in enumerate(content) if byte != content[one]]
    return one, draw.choice(others or [one])


def _but(files: dict, name: str, content: bytes | None) -> dict:
    return {**files, name: content}


def _after_damage(
    answer: Any, folder: Path, states: dict, last: int, own: list[str], words: str
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = answer.load(folder)
        except Exception as error:
            raise Wrong(
                f"{words}: load raises {type(error).__name__}: {error}\n"
                f"Nothing of step {last - 1} is damaged, and that is asked for."
            ) from None
    if found is None:
        raise Wrong(f"{words}: load gives None, and the checkpoint of step {last - 1} is whole.")
    step = found[0]
    if step not in (last, last - 1):
        raise Wrong(f"{words}: load gives step {described(step)}; {last - 1} is whole.")
    wrong = difference(states[step], found[1])
    if wrong:
        raise Wrong(f"{words}: load gives a state that was never saved: {wrong}.")
    parts = {part for name in own for part in Path(name).parts}
    said = " ".join(str(one.message) for one in warned)
    if step < last and own and not any(part in said for part in parts):
        raise Wrong(
            f"{words}: load gives step {step}, and the warning that names a damaged file of step "
            f"{last}\nis {described(said) if said else 'missing'}."
        )


def _goes_back(answer: Any, folder: Path, states: dict, own: list[str]) -> None:
    """The newest is damaged, and the run goes on from the one before."""
    for name in own:
        if (folder / name).is_file() and not (folder / name).is_symlink():
            (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    step, _ = loaded(answer, folder, states)
    for again in (step + 1, step + 2):
        answer.save(folder, copied(states[again]), again)
        found, _ = loaded(answer, folder, states)
        if found != again:
            raise Wrong(
                f"step {step + 1} was damaged, the run has gone back to {step} and saved "
                f"{again}: load gives {found}."
            )


def _foreign(folder: Path) -> dict[str, bytes]:
    """Others' files."""
    for name, content in FOREIGN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return FOREIGN


def _files(folder: Path) -> dict[str, bytes | str]:
    """{name: content}, of a link where it points to."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def _write(folder: Path, good: dict, files: dict) -> None:
    """Makes the files of a folder these; None: it is not there."""
    there = _files(folder)
    for name in {*good, *files, *there}:
        content, path = files.get(name), folder / name
        if content == there.get(name):
            continue
        if name in there and not (isinstance(content, bytes) and isinstance(there[name], bytes)):
            path.unlink()
        if isinstance(content, str):
            path.symlink_to(content)
        elif content is not None:
            path.write_bytes(content)


# ---- 3. power cuts


def _cuts(answer: Any, place: str, seed: int) -> None:
    """On a rank."""
    warnings.simplefilter("ignore")
    file, place = Path(answer.__file__), Path(place)
    folder = place / "runs" / "new" / "run"
    apart(_cut, file, place, folder, seed)
    apart(_read, file, folder)
    apart(_full, file, folder, all_states(seed, 6))


def _cut(file: Path, place: Path, folder: Path, seed: int) -> None:
    """In a fork: saves into a folder that `save` makes, the last time of a run that has gone back,
    and then what each cut would have left."""
    runs, states = place / "runs", all_states(seed, 9)
    runs.mkdir()
    cuts = Cuts(runs)
    answer = load_answer(file)
    for step, before in ((1, 0), (2, 1), (3, 2), (9, 3), (5, 3)):
        cuts.begun, cuts.returned = step, before
        answer.save(folder, copied(states[step]), step)
        cuts.returned = step
        cuts.note("after it")
    left = place / "left"
    for cut in cuts.end():
        for names, fill in (("all", FILLS[0]), ("all", FILLS[1]), ("certain", FILLS[0])):
            cut.left(left, cuts.root, names, fill)
            _after_cut(answer, left / folder.relative_to(runs), states, cut, names)
            shutil.rmtree(left)


def _read(file: Path, folder: Path) -> None:
    """In a fork: nothing that stands in a file is run."""
    answer, ran = load_answer(file), []
    answer.load(folder)  # what it imports meanwhile runs, too
    sys.addaudithook(lambda event, _: ran.append(event) if event in RUNS else None)
    answer.load(folder)
    if ran:
        raise Wrong(
            f"load runs code that stands in a file ({ran[0]}): whoever can write there could do\n"
            "anything here. What of it is data?"
        )


def _full(file: Path, folder: Path, states: dict) -> None:
    """In a fork: the disk has no more room; the newest step is 5."""
    answer = load_answer(file)
    most = max(map(len, _files(folder).values()))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 1, most // 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # Python ignores the signal
        try:
            answer.save(folder, copied(states[6]), 6)
            raised = False
        except Exception:
            raised = True
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        step, _ = loaded(answer, folder, states)
        if step != 5:
            raise Wrong(f"on a full disk save of step 6 fails: load gives {step}, 5 is whole.")
        if not raised:
            raise Wrong("on a full disk save returns as if it had saved: let the error be seen.")


def _after_cut(answer: Any, left: Path, states: dict, cut: Any, names: str) -> None:
    when = f"the power is cut {cut.when if cut.when == 'after it' else 'before ' + cut.when}"
    case = f"in save of step {cut.begun} {when}"
    if cut.when == "after it":
        case = f"the power is cut after save of step {cut.begun} has returned"
    try:
        step, _ = loaded(answer, left, states)
    except Wrong as error:
        raise Wrong(f"{case}: {error}") from None
    if step < cut.returned or (cut.when == "after it" and step != cut.begun):
        lost = "names" if names == "certain" else "contents of files"
        raise Wrong(
            f"{case}: load gives {f'step {step}' if step else 'None'}, and save had returned for "
            f"step {cut.returned}.\nWhich {lost} had not been synced by then?"
            + ("" if step else " A folder that save makes is a name in another one.")
        )


# ---- 4. kills


def _kills(answer: Any, place: str, seed: int) -> None:
    """On a rank: lives, one after the other."""
    warnings.simplefilter("ignore")
    draw, file = random.Random(seed), Path(answer.__file__)
    states = all_states(seed, lives.SAVES * lives.EVERY * (KILLS + 2))
    calm, folder = Path(place) / "calm", Path(place) / "run"
    calm.mkdir()
    calls, size, seconds = apart(lives.calls_of_a_save, file, calm, states)
    folder.mkdir()
    foreign = _foreign(folder)
    board, told = lives.Board(), []
    for kill in lives.drawn_kills(draw, calls, size, seconds):
        told.append(kill)
        try:
            lives.killed(file, folder, states, board, kill)
        except Wrong as error:
            before = f"after a process was {told[-2]}: " if told[1:] else ""
            raise Wrong(f"{before}{error}") from None
    try:
        last = apart(lives.live, file, folder, states, board, None)
    except Wrong as error:
        raise Wrong(f"after a process was {told[-1]}: {error}") from None
    found, _ = apart(_last, file, folder, states)
    if found != last:
        raise Wrong(f"load gives step {found}, and save had returned for step {last}.")
    left = {name: content for name, content in _files(folder).items() if name not in foreign}
    wanted = _files(calm)
    if len(left) > len(wanted) or _bytes(left) > 1.1 * _bytes(wanted) + 4096:
        raise Wrong(
            f"after {KILLS} kills and two saves the folder has {len(left)} files and "
            f"{_bytes(left):,} bytes, of a run that was not killed {len(wanted)} and "
            f"{_bytes(wanted):,}.\nDoes save remove what a killed one has left? There is "
            f"{_some(left, wanted)}."
        )
    for name, content in foreign.items():
        if _files(folder).get(name) != content:
            raise Wrong(f"{name} was in the folder before, and is not what it was: it is others'.")


def _last(file: Path, folder: Path, states: dict) -> tuple[int, None]:
    return loaded(load_answer(file), folder, states)[0], None


def _bytes(files: dict) -> int:
    return sum(map(len, files.values()))


def _some(left: dict, wanted: dict) -> str:
    return ", ".join(sorted(set(left) - set(wanted))[:3])
