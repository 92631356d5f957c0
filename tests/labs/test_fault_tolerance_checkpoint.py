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
from utils.course.assertions import Wrong

LAB = Lab("13_fault_tolerance", {"checkpoint": ("check_checkpoint", "checkpoint", "checkpoint.py")})


class TestLab(LabTests):
    lab = LAB


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
