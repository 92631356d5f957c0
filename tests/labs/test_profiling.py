"""Lab 11: the answers that its checks must accept and reject, and that its faults can be found."""

import re

import pytest

from labs.support.profiling import programs, runs
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from tests.tiers import first
from utils.measure.divergence import first_between, first_difference
from utils.measure.findings import report

LAB = Lab(
    "11_profiling",
    {
        **{name: ("contracts", f"{name}_diagnosis", "diagnosis.py") for name in programs.FAULTY},
        **{f"{name}_program": ("contracts", name, f"{name}.py") for name in programs.FAULTY},
    },
)


class TestLab(LabTests):
    lab = LAB


# ---- the lesson's tools find the faults


def numbers_for(cause_of, causes) -> list[int]:
    """The first number that plants each of these causes."""
    found = {}
    for number in range(1, 1000):
        found.setdefault(cause_of(number), number)
    return sorted(found[cause] for cause in causes)


@pytest.fixture
def handed_out(tmp_path):
    """broken(number, name): the path of a program in a learner's folder."""

    def broken(number, name):
        (tmp_path / "diagnosis.py").write_text(f"NUMBER = {number}\n")
        programs.hand_out(tmp_path)
        return tmp_path / "broken" / f"{name}.py"

    return broken


def late(number):
    """The cause, if the delay is long enough for a busy machine."""
    found = programs.slow(number).truth
    return found["cause"] if found["ms"] > 80 else None


def messages(number):
    return programs.slow(number).truth["message_cause"] if late(number) else None


SLOW = {*numbers_for(late, programs.LATE.values()), *numbers_for(messages, programs.MESSAGES)}


@pytest.mark.parametrize(("number",), first(2, zip(sorted(SLOW))))
def test_what_makes_it_slow_is_found(handed_out, number):
    path, right = handed_out(number, "slow"), programs.slow(number).truth
    made = report(runs.traced(path))
    assert max(made.late, key=made.late.get) == right["rank"]
    ms, name = re.findall(r"([\d.]+)  (\w+) \(machine", runs.profiled(path, right["rank"]))[0]
    assert programs.LATE[name] == right["cause"]
    assert float(ms) / programs.STEPS > 0.98 * right["ms"]  # a sleep may be longer
    lines = path.read_text().splitlines()
    assert [n for n, line in enumerate(lines, 1) if f".{name}(" in line] == right["line"]
    found = made.collectives().values()
    assert sum(one["calls"] for one in found) == right["message_calls"]
    assert sum(one["bytes"] or 0 for one in found) == right["message_bytes"]


def hangs(number):
    return programs.hanging(number).truth["cause"]


@pytest.mark.parametrize(("number",), first(2, zip(numbers_for(hangs, programs.HANGS))))
def test_who_left_the_others_is_found(handed_out, number):
    said = runs.stands_still(handed_out(number, "hanging"))
    right = programs.hanging(number).truth
    alone, others = sorted(
        re.split(r"\n(?=ranks? )", said)[1:],
        key=lambda block: not block.startswith(f"rank {right['rank']} "),
    )
    assert alone.startswith(f"rank {right['rank']} ") and others.startswith("ranks ")
    assert [int(line) for line in re.findall(r"hanging.py:(\d+)", others)][-1] in right["waits"]


def wrongs(number):
    return programs.wrong(number).truth["cause"]


@pytest.mark.parametrize(("number",), first(2, zip(numbers_for(wrongs, programs.WRONGS))))
def test_the_first_wrong_number_is_found(handed_out, number):
    one, ranks = runs.watched(handed_out(number, "wrong"))
    right = programs.wrong(number).truth
    # if the replicas agree, compare with a single rank
    whole = right["cause"] in ("sum not divided", "clipped alone")
    found = first_difference(one, ranks) if whole else first_between(ranks)
    assert found.entry.step == right["step"]
    if right["name"] != [None]:
        assert found.entry.name in right["name"]
    rank = found.rank
    if right["cause"] == "clipped alone":
        place = found.entry.step, "backward", ""
        own = [[e.norm for e in some if (e.step, e.phase, e.name) == place] for some in ranks]
        rank = own.index(max(own))
    assert right["rank"] in (None, rank)


def test_a_number_gives_the_same_programs_and_others_give_others():
    for make in programs.FAULTY.values():
        assert make(7) == make(7) and len({make(n).text for n in range(1, 40)}) == 39
        assert all(max(map(len, make(n).text.splitlines())) <= 100 for n in range(1, 200))
        assert all(make(n).text != make(n).sound for n in range(1, 40))


# ---- handing out


def test_handing_out_keeps_what_is_mended(tmp_path, capsys):
    programs.hand_out(tmp_path)
    assert "Nothing is handed out yet" in capsys.readouterr().out
    (tmp_path / "diagnosis.py").write_text("OTHER: int = 3\nNUMBER: int = 17  # mine\n")
    stub = 'def train():\n    raise NotImplementedError("hand out")\n'
    (tmp_path / "slow.py").write_text(stub)
    (tmp_path / "wrong.py").write_text("# mine\n")
    programs.hand_out(tmp_path)
    assert (tmp_path / "slow.py").read_text() == programs.slow(17).text
    assert (tmp_path / "broken" / "wrong.py").read_text() == programs.wrong(17).text
    assert (tmp_path / "wrong.py").read_text() == "# mine\n"
    assert "stays as it is" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["NUMBER = 0", "NUMBER = 'me'", "NUMBER = 1 + 1", "number = 3"])
def test_a_number_that_is_none_gets_one_sentence(tmp_path, line):
    (tmp_path / "diagnosis.py").write_text(line + "\n")
    with pytest.raises(ValueError, match="write NUMBER = 17, or another integer"):
        programs.number_in(tmp_path)
