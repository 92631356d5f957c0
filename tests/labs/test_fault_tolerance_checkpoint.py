"""Lab 13, exercise a: the answers that its check must accept and reject, and its pieces."""

import os
import resource
import signal

import pytest

from labs.support.fault_tolerance.lives import Board, all_states, apart, die, difference, new_state
from labs.support.fault_tolerance.lives import train as train_a_step
from labs.support.fault_tolerance.power import Cuts
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.expect import Wrong

LAB = Lab("13_fault_tolerance", {"checkpoint": ("check_checkpoint", "checkpoint", "checkpoint.py")})

OTHERS = {
    "checkpoint: a folder for each, safetensors, JSON and SHA256SUMS, names by their number": """
import json
import shutil
import tempfile

import safetensors.torch

NAME = re.compile(r"checkpoint-([0-9]+)-[a-z0-9_]+")


def save(folder, state, step):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    os.sync()
    beside = Path(tempfile.mkdtemp(prefix=".partial-checkpoint-", dir=folder))
    tensors = {n: v for n, v in state.items() if isinstance(v, torch.Tensor)}
    places = {name: str(number) for number, name in enumerate(tensors)}
    safetensors.torch.save_file(
        {places[n]: v.detach().contiguous().clone() for n, v in tensors.items()},
        beside / "tensors.safetensors",
    )
    about = {"step": step, "places": places, "order": list(state),
             "numbers": {n: v for n, v in state.items() if n not in tensors}}
    (beside / "about.json").write_text(json.dumps(about))
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in beside.iterdir()}
    (beside / "SHA256SUMS").write_text("".join(f"{s}  {n}\\n" for n, s in sums.items()))
    for path in beside.iterdir():
        with path.open("rb") as file:
            os.fsync(file)
    sync(beside)
    beside.rename(folder / f"checkpoint-{step}-{beside.name.removeprefix('.partial-checkpoint-')}")
    sync(folder)
    new = beside.name.removeprefix(".partial-checkpoint-")
    found = [p for p in checkpoints(folder) if p.name.endswith(f"-{new}") or step_of(p) < step]
    for path in [*checkpoints(folder), *folder.glob(".partial-checkpoint-*")]:
        if path not in found[:2]:
            shutil.rmtree(path)
            sync(folder)


def load(folder):
    for path in checkpoints(Path(folder)):
        try:
            sums = dict(
                reversed(line.split("  "))
                for line in (path / "SHA256SUMS").read_text().splitlines()
            )
            assert set(sums) == {"about.json", "tensors.safetensors"}, "files are missing"
            for name, digest in sums.items():
                content = (path / name).read_bytes()
                assert hashlib.sha256(content).hexdigest() == digest, f"{name} does not fit"
            about = json.loads((path / "about.json").read_text())
            tensors = safetensors.torch.load_file(path / "tensors.safetensors")
            state = {n: tensors[p] for n, p in about["places"].items()} | about["numbers"]
            return about["step"], {name: state[name] for name in about["order"]}
        except (OSError, AssertionError, ValueError, KeyError) as error:
            warnings.warn(f"{path} is damaged: {error}")
    return None
""",
    "checkpoint: two slots that are written in turn, without a rename": """
SLOTS = "slot a", "slot b"


def save(folder, state, step):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    os.sync()
    here = [(read(folder / name), name) for name in SLOTS]
    before = [(found[0], name) for found, name in here if found and found[0] < step]
    keep = max(before)[1] if before else None
    write(folder / next(name for name in SLOTS if name != keep), state, step)
    sync(folder)
    for found, name in here:
        if name == keep or not found or (found[0] < step and keep):
            continue
        if name != next(n for n in SLOTS if n != keep):
            (folder / name).unlink()


def write(path, state, step):
    memory = io.BytesIO()
    own = {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}
    torch.save({"step": step, "state": own}, memory)
    with open(path, "wb") as file:
        file.write(memory.getvalue() + hashlib.blake2b(memory.getvalue()).digest())
        file.flush()
        os.fsync(file)


def read(path):
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if hashlib.blake2b(content[:-64]).digest() != content[-64:]:
        warnings.warn(f"{path.name} is damaged")
        return None
    found = torch.load(io.BytesIO(content[:-64]), weights_only=True)
    return found["step"], found["state"]


def load(folder):
    found = [read(Path(folder) / name) for name in SLOTS]
    return max((one for one in found if one), key=lambda one: one[0], default=None)
""",
    "checkpoint: the hash is in the name, and the name is a link": """
NAME = re.compile(r"([0-9]+)\\.[0-9a-f]{64}")


def step_of(path):
    return int(NAME.fullmatch(path.name)[1])


def save(folder, state, step):
    os.makedirs(folder, exist_ok=True)
    memory = io.BytesIO()
    torch.save([step, {
        n: v.detach().contiguous().clone() if isinstance(v, torch.Tensor) else v
        for n, v in state.items()
    }], memory)
    data = memory.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    beside = os.path.join(folder, ".beside")
    Path(beside).unlink(missing_ok=True)  # it may be a link to a checkpoint
    number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    while data:
        data = data[os.write(number, data[:10_000]):]
    os.fdatasync(number)
    os.close(number)
    name = f"{step}.{digest}"
    try:
        os.link(beside, os.path.join(folder, name))
    except FileExistsError:
        os.replace(beside, os.path.join(folder, name))
    os.sync()
    old = [p for p in checkpoints(Path(folder)) if step_of(p) < step]
    for path in checkpoints(Path(folder)):
        if path not in old[:1] and path.name != name:
            path.unlink()
            os.sync()
    Path(beside).unlink(missing_ok=True)


def load(folder):
    for path in checkpoints(Path(folder)):
        data = path.read_bytes()
        if path.name.endswith(hashlib.sha256(data).hexdigest()):
            return tuple(torch.load(io.BytesIO(data), weights_only=True))
        warnings.warn(path.name)
""",
    "checkpoint: a hash beside the file, torch.save to a path": """
def save(folder, state, step):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    os.sync()
    data = folder / f"step-{step}.checkpoint.part"
    own = {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}
    torch.save((step, own), data)
    with data.open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    for path in checkpoints(folder):
        if step_of(path) >= step:  # what is given up, from the newest on
            path.unlink()
            sync(folder)
    hashed = folder / f"step-{step}.checkpoint.sha256"
    with hashed.open("w") as file:
        print(digest, file=file, flush=True)
        os.fsync(file.fileno())
    sync(folder)
    data.rename(folder / f"step-{step}.checkpoint")
    sync(folder)
    for path in checkpoints(folder)[2:]:
        path.unlink()
    stay = {str(path) for path in checkpoints(folder)}
    for path in folder.glob("step-*.checkpoint.*"):
        if str(path.with_suffix("")) not in stay or path.suffix == ".part":
            path.unlink()


def load(folder):
    for path in checkpoints(Path(folder)):
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if Path(f"{path}.sha256").read_bytes() == f"{digest}\\n".encode():
                return torch.load(path, weights_only=True)
        except OSError:
            pass
        warnings.warn(f"{path} or its hash is damaged", stacklevel=2)
    return None
""",
    "checkpoint: each tensor a file, one manifest a checkpoint": """
import json
import shutil

NAME = re.compile(r"g([0-9]+)\\.json")


def save(folder, state, step):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    os.sync()
    for path in checkpoints(folder):
        if step_of(path) >= step and not whole(path):
            path.unlink()
    data = folder / f"data-{step}-{os.getpid()}-{os.urandom(4).hex()}"
    data.mkdir()
    entries = []
    for number, (name, value) in enumerate(state.items()):
        if not isinstance(value, torch.Tensor):
            entries.append([name, value])
            continue
        raw = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        raw = raw if value.numel() else b""
        put(data / str(number), raw)
        kind = str(value.dtype).removeprefix("torch.")
        entries.append([name, kind, list(value.shape), str(number), digest(raw)])
    sync(data)
    text = json.dumps({"step": step, "data": data.name, "entries": entries})
    put(folder / ".manifest", (digest(text.encode()) + text).encode())
    os.replace(folder / ".manifest", folder / f"g{step}.json")
    sync(folder)
    left = [p for p in checkpoints(folder) if step_of(p) <= step][:2]
    for path in checkpoints(folder):
        if path not in left:
            path.unlink()
            sync(folder)
    stay = {json.loads(path.read_text()[64:])["data"] for path in left if whole(path)}
    for path in folder.glob("data-*-*-*"):
        if path.name not in stay:
            shutil.rmtree(path)


def put(path, raw):
    with path.open("wb", buffering=0) as file:
        while raw:
            raw = raw[file.write(raw):]
        os.fsync(file.fileno())


def digest(raw):
    return hashlib.sha256(raw).hexdigest()


def whole(path):
    content = path.read_bytes()
    return digest(content[64:]).encode() == content[:64]


def load(folder):
    for path in checkpoints(Path(folder)):
        try:
            if not whole(path):
                raise ValueError("its hash")
            about = json.loads(path.read_bytes()[64:])
            state = {}
            for name, value, *more in about["entries"]:
                if more:
                    shape, number, right = more
                    raw = (path.parent / about["data"] / number).read_bytes()
                    if digest(raw) != right:
                        raise ValueError(number)
                    dtype = getattr(torch, value)
                    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else None
                    value = torch.empty(shape, dtype=dtype) if flat is None else flat.view(shape)
                state[name] = value
            return about["step"], state
        except (OSError, ValueError) as error:
            warnings.warn(f"{path.name} is damaged: {error}")
    return None
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 25, (25, 9, 5)


def write(path, content, sync):
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def what_cuts_leave(place):
    """In a fork: after a synced and an unsynced file, [what each kind of cut leaves]."""
    folder = place / "run"
    folder.mkdir()
    cuts = Cuts(folder)
    write(folder / "synced", b"right", sync=True)
    write(folder / "not", b"lost!", sync=False)
    cuts.note("names not synced")
    opened = os.open(folder, os.O_RDONLY)
    os.fsync(opened)
    os.replace(folder / "synced", folder / "renamed")
    cuts.note("renamed")
    found = []
    for cut in [cut for cut in cuts.end() if cut.when in ("names not synced", "renamed")]:
        for names, fill in (("all", "zeros"), ("all", "nothing"), ("certain", "zeros")):
            left = place / f"left {len(found)}"
            cut.left(left, cuts.root, names, fill)
            found.append({path.name: path.read_bytes() for path in left.iterdir()})
    return found


def test_a_power_cut_leaves_what_was_synced(tmp_path):
    before = [{"synced": b"right", "not": bytes(5)}, {"synced": b"right", "not": b""}, {}]
    after = [{"renamed": b"right", "not": bytes(5)}, {"renamed": b"right", "not": b""}, before[0]]
    assert apart(what_cuts_leave, tmp_path) == before + after


def dies_at(path, place):
    """In a fork."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (place, place))
    path.write_bytes(bytes(100))


def test_a_process_dies_at_a_byte(tmp_path):
    assert apart(dies_at, tmp_path / "file", 37) is None
    assert (tmp_path / "file").stat().st_size == 37


def test_a_fork_gives_its_result_or_says_what_failed():
    assert apart(lambda: [1, 2]) == [1, 2]
    assert apart(die) is None
    with pytest.raises(Wrong, match=r"ZeroDivisionError in .*: division by zero"):
        apart(lambda: 1 / 0)
    board = Board()
    apart(board.__setitem__, 1, 7)
    assert [board[0], board[1]] == [0, 7]


def test_a_run_that_goes_on_ends_as_one_that_was_not_disturbed():
    states = all_states(3, 6)
    state = states[4]
    train_a_step(state)
    train_a_step(state)
    assert difference(states[6], state) is None
    assert "'weights' (str) does not have the bits" in difference(states[5], state)
    assert difference(new_state(3), states[0]) is None
