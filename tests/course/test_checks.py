"""Checks never raise, print one of three marks, read the current file and end hangs."""

import time

import pytest
import torch.distributed as dist

from tests.patience import patience
from utils.course import ledger, runner
from utils.course.assertions import NotHere, Wrong
from utils.course.checks import check
from utils.course.runner import Trial


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "answer.py"
    path.write_text("def number():\n    return 41\n")
    return path


def numbers(answer) -> list:
    return answer.number()


SEEN = "    The cases were drawn from seed 7.\n"
AGAIN = "    The same cases again: check(…, seed=7)\n"


def judge(trial) -> str:
    """The right number is 42 on both ranks."""
    trial.new_seed()
    for rank, number in enumerate(trial.on_ranks(2, numbers, hang="Advice for a hang.")):
        if number != 42:
            raise Wrong(f"rank {rank} says {number}.\nIt is one more.")
    return "the number is right."


def remembered() -> dict:
    return ledger.read()["checks"]


def test_the_three_marks(file, capsys):
    check("01x number", judge, file, seed=7)
    out = capsys.readouterr().out
    assert out == "[x] 01x number: rank 0 says 41.\n    It is one more.\n" + AGAIN
    assert remembered() == {"01x number": False}
    file.write_text("def number():\n    return 42\n")
    check("01x number", judge, file, seed=7)
    assert capsys.readouterr().out == "[ok] 01x number: the number is right.\n" + SEEN
    assert remembered() == {"01x number": True}
    file.write_text('def number():\n    raise NotImplementedError("say the number")\n')
    check("01x number", judge, file, seed=7)
    out = capsys.readouterr().out
    assert out == "[ ] 01x number: not started. Your task: say the number\n"


BROKEN = {
    "def number(:": "answer.py line 1 is not valid Python: ",
    "number = 1 / 0": "ZeroDivisionError in answer.py line 1 (`number = 1 / 0`): division",
    "def number():\n    return secret": "NameError in answer.py line 2 (`return secret`): name",
    "def other(): pass": "has no attribute 'number'",
    "def number():\n    while True: pass": "did not finish within 1 s in answer.py line 2 (`while",
    "def number():\n    while True:\n        try: sum(range(999))\n"
    "        except BaseException: pass": "did not finish within 1 s in answer.py line",
    "def number():\n    raise SystemExit": "the code exits the program in answer.py line 2",
    "import os\ndef number():\n    os._exit(3)": " ended with code 3.",
    "import os\ndef number():\n    os.abort()": "was killed by SIGABRT in answer.py line 3",
    "def number():\n    return lambda: 1": "It is one more.",
}


@pytest.mark.parametrize("source", BROKEN)
def test_whatever_the_file_does_the_check_only_prints(source, file, capsys, monkeypatch):
    monkeypatch.setattr(runner, "TOO_LONG", 1.0)
    file.write_text(source + "\n")
    check("01x number", judge, file, seed=7)
    out = capsys.readouterr().out
    assert out.startswith("[x] 01x number: ") and BROKEN[source] in out, out
    assert " trial.py:" not in out and "Advice" not in out
    assert remembered() == {"01x number": False}


def test_a_library_that_is_busy_in_a_thread_is_not_the_answers_time(file, capsys, monkeypatch):
    monkeypatch.setattr(runner, "TOO_LONG", 0.5)
    file.write_text(
        "import threading, time\n\n"
        "def busy():\n"
        "    while time.process_time() < begun + 0.8: pass\n\n"
        "def number():\n"
        "    global begun\n"
        "    begun = time.process_time()\n"
        "    thread = threading.Thread(target=busy)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "    return 42\n"
    )
    check("01x number", judge, file, seed=7)
    assert "[ok] 01x number" in capsys.readouterr().out


def test_an_error_shows_the_lines_of_the_file_as_it_is_now(file, capsys):
    for name in ("first", "second"):
        file.write_text(f"def number():\n    return {name}\n")
        check("01x number", judge, file, seed=7)
        assert f"answer.py line 2 (`return {name}`)" in capsys.readouterr().out


def test_a_file_that_is_not_there(tmp_path, capsys):
    check("01x number", judge, tmp_path / "none.py")
    assert "[x] 01x number: there is no file" in capsys.readouterr().out


def test_a_hang_ends_and_says_where_each_rank_is(file, capsys):
    file.write_text(
        "import torch\nimport torch.distributed as dist\n\n"
        "def number():\n"
        "    if dist.get_rank() == 0:\n"
        "        dist.recv(torch.zeros(1), 1)\n"
        "    dist.barrier()\n"
        "    return 42\n"
    )
    start = time.monotonic()
    check("01x number", judge, file, seed=7)
    assert time.monotonic() - start < patience(60)
    out = capsys.readouterr().out
    assert out.startswith("[x] 01x number: with 2 ranks: A call did not complete and never")
    assert "answer.py:6: dist.recv(torch.zeros(1), 1)" in out
    assert out.endswith("    Advice for a hang.\n" + AGAIN)


def test_what_cannot_run_here_is_neither_right_nor_wrong(file, capsys):
    def judge(trial):
        raise NotHere("there is no server for this machine")

    check("01x number", judge, file, seed=7)
    assert capsys.readouterr().out == "[ ] 01x number: there is no server for this machine\n"
    assert "01x number" not in remembered()


def test_prints_of_the_answer_are_shown(file, capsys):
    file.write_text("def number():\n    print('a trace')\n    return 42\n")
    check("01x number", judge, file, seed=7)
    assert "all ranks │ a trace" in capsys.readouterr().out


def test_an_error_of_the_judge_does_not_stop_the_notebook(file, capsys):
    def broken(trial):
        raise KeyError("oops")

    check("01x number", broken, file)
    assert capsys.readouterr().out == "[x] 01x number: KeyError: 'oops'\n"


def test_a_ledger_that_cannot_be_written_does_not_stop_the_check(
    file, tmp_path, monkeypatch, capsys
):
    (tmp_path / "flat").write_text("")
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "flat"))
    check("01x number", judge, file, seed=7)
    assert capsys.readouterr().out.startswith("[x] 01x number: rank 0 says 41.")


def blocks(answer) -> float:
    """The time when rank 0 has sent a value, and when rank 1, half a second late, begins to
    receive: by the machine's clock, which all processes share."""
    import torch

    dist.barrier()
    if dist.get_rank() == 0:
        dist.send(torch.zeros(1), 1)
        return time.monotonic()
    time.sleep(0.5)
    begins = time.monotonic()
    dist.recv(torch.zeros(1), 0)
    return begins


def test_sends_really_block(file):
    """Deadlock checks rely on this: gloo's send waits for the receive, even for 4 bytes."""
    sent, begins = Trial(file).on_ranks(2, blocks)
    assert sent > begins


def test_tries_and_the_last_symptom_are_remembered(file):
    def tried():
        entry = ledger.read()["tries"]["01x number"]
        return entry["count"], entry["symptom"], entry["at"]

    begin = time.time()
    for count in (1, 2):
        check("01x number", lambda _: "nothing.", file.with_name("none.py"))
        assert tried()[0] == count
        assert tried()[1].startswith("there is no file ") and begin <= tried()[2] <= time.time()
    check("01x number", lambda _: "right.", file)
    count, symptom, at = tried()
    assert (count, symptom) == (3, "")
    check("01x number", lambda _: "right.", file)
    assert tried() == (4, "", at)  # when it became right


def test_in_a_class_a_wrong_answer_says_how_to_ask(file, capsys, monkeypatch):
    monkeypatch.setenv(ledger.CLASS, "owl")
    check("01x number", lambda _: "right.", file.with_name("none.py"))
    assert capsys.readouterr().out.endswith(
        "    Stuck? from utils.course import ask_for_help; ask_for_help()\n"
    )
    check("01x number", lambda _: "right.", file)
    assert "Stuck" not in capsys.readouterr().out
