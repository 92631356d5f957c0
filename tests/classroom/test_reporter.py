"""What a lab reports: all of it, once, later if it must be, and never at the lab's cost."""

import http.server
import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from tests.classroom.boards import (
    CHECK,
    GUESS,
    OTHER,
    RunningBoard,
    check,
    environment,
    fill_up,
    until,
)
from tests.patience import patience
from utils.classroom import reporter as reporter_module
from utils.classroom import reports
from utils.classroom.join import Membership, outbox_file, read_address
from utils.classroom.outbox import Outbox
from utils.classroom.reporter import Reporter
from utils.course import ask_for_help, helped, ledger
from utils.course.predictions import predict, reveal
from utils.paths import ROOT


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(ledger.CLASS, "owl")
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def board(tmp_path):
    with RunningBoard(tmp_path / "board.sqlite") as board:
        yield board


def note(name, passed, symptom=""):
    ledger.change(lambda content: ledger.note_check(content, name, passed, symptom))


def joined(address, home, alias="owl", learner="a" * 32):
    """A member of the class, who is in class.json."""
    member = Membership(address, alias, learner)
    key = read_address(address).key
    (home / "class.json").write_text(json.dumps({key: vars(member)}))
    return member


class Beside:
    """The reporter as a process, as `make lab CLASS=…` starts it."""

    def __init__(self, address, home):
        words = [sys.executable, "-m", "utils.classroom.reporter", read_address(address).key]
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=environment(home), stdin=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def end(self):
        """Its lab ends; what it said."""
        return self.process.communicate(timeout=patience(20))[1]


def waiting(address):
    """How many reports the board does not have."""
    with sqlite3.connect(outbox_file(read_address(address).key)) as file:
        return file.execute("select count(*) from queue").fetchone()[0]


# --- the outbox -------------------------------------------------------------------------------


def states(**checks):
    return {
        ("check", name): {"done": done, "tries": 1, "symptom": "", "at": None}
        for name, done in checks.items()
    }


def test_differences_become_reports_in_order(tmp_path):
    outbox = Outbox(tmp_path / "outbox")
    assert outbox.note(states(a=False, b=True)) == 2
    assert outbox.note(states(a=False, b=True)) == 0
    assert outbox.note(states(a=True, b=True)) == 1
    found = [(one["number"], one["name"], one["done"]) for one in outbox.first(50)]
    assert found == [(1, "a", False), (2, "b", True), (3, "a", True)]
    outbox.drop(2)
    outbox.close()
    again = Outbox(tmp_path / "outbox")
    assert again.id == outbox.id
    assert [one["number"] for one in again.first(50)] == [3]
    again.drop(3)
    assert again.note(states(a=False, b=True)) == 1
    assert [one["number"] for one in again.first(50)] == [4]  # never a number that was


def test_an_outbox_that_is_none_is_kept_aside(tmp_path):
    path = tmp_path / "outbox.sqlite"
    path.write_bytes(b"no database at all, " * 500)
    outbox = Outbox(path)
    assert outbox.note(states(a=True)) == 1
    assert (tmp_path / "outbox.unreadable").read_bytes().startswith(b"no database")


# --- with a board -----------------------------------------------------------------------------


def test_checks_predictions_and_questions_report_themselves(board, home):
    note(CHECK, False, "rank 0 says 41.")  # before it has joined
    joined(board.join, home)
    with Beside(board.join, home) as beside:
        until(lambda: board.learners().get("owl", {}).get("checks"))
        note(CHECK, False, "rank 1 says 43.")
        note(OTHER, True)
        predict(GUESS, 12, "MB")
        reveal(GUESS, theory=8, measured=8.04, show="text")
        ask_for_help("Why 41?")
        until(lambda: (row := board.learners()["owl"])["help"] and OTHER in row["checks"])
        row = board.learners()["owl"]
        assert row["checks"][CHECK][:2] == [False, 2]
        assert row["checks"][CHECK][3] == "rank 1 says 43." and row["help"][0] == "Why 41?"
        assert row["checks"][OTHER][:2] == [True, 1] and board.room()[1]["predictions"][GUESS] == 1
        helped()
        until(lambda: board.learners()["owl"]["help"] is None)
        assert "the board has all" in beside.end()
        assert beside.process.returncode == 0
    assert waiting(board.join) == 0


def test_a_board_that_is_away_gets_it_all_later_and_once(board, home):
    joined(board.join, home)
    board.kill()
    with Beside(board.join, home) as beside:
        for tries in range(3):
            note(CHECK, False, f"symptom {tries}")
            until(lambda tries=tries: outbox_has(board.join, tries + 1))
        board.start()
        until(lambda: board.learners().get("owl", {}).get("checks"))
        until(lambda: waiting(board.join) == 0)
        board.kill()
        note(CHECK, True)
        said = beside.end()  # the last look queues it
    assert "the board is away" in said and waiting(board.join) == 1
    board.start()
    with Beside(board.join, home):  # the lab's next start
        until(lambda: board.learners()["owl"]["checks"][CHECK][0])
    with sqlite3.connect(board.file) as file:  # three symptoms, done
        assert file.execute("select reports from learners").fetchall() == [(4,)]


def outbox_has(address, count):
    try:
        return waiting(address) >= count
    except sqlite3.Error:
        return False


def test_an_answer_that_is_lost_does_not_count_twice(board, home, monkeypatch):
    """The board has taken it, and its answer did not come."""
    note(CHECK, False, "symptom")
    reporter = Reporter(joined(board.join, home))
    reporter.look()
    ask = type(reporter.address).ask

    def loses(self, *words):
        ask(self, *words)
        raise reporter_module.Away("timed out")

    with monkeypatch.context() as patched:
        patched.setattr(type(reporter.address), "ask", loses)
        assert reporter.send() is False
    assert waiting(board.join) == 1
    reporter.until = 0.0
    reporter.send()
    assert waiting(board.join) == 0
    with sqlite3.connect(board.file) as file:
        assert file.execute("select reports from learners").fetchall() == [(1,)]


def test_two_labs_on_one_ledger_report_once(board, home):
    joined(board.join, home)
    with Beside(board.join, home) as first, Beside(board.join, home) as second:
        note(CHECK, True)
        until(lambda: board.learners().get("owl", {}).get("checks"))
        until(lambda: waiting(board.join) == 0)
        first.end()
        note(OTHER, True)  # the second takes over
        until(lambda: OTHER in board.learners()["owl"]["checks"])
        second.end()
    with sqlite3.connect(board.file) as file:
        assert file.execute("select reports from learners").fetchall() == [(2,)]


def test_it_ends_with_its_lab_even_where_that_is_killed(board, home, tmp_path):
    joined(board.join, home)
    key = read_address(board.join).key
    lab = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-m', 'utils.classroom.reporter', {key!r}],"
        " stdin=subprocess.PIPE)\nprint(p.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", lab], cwd=ROOT, env=environment(home), stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until(lambda: not runs(pid))


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- boards that answer oddly -----------------------------------------------------------------


class Odd(http.server.BaseHTTPRequestHandler):
    answers = ()
    got = ()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append(reports.message(body))  # what a lab sends is always a message
        status, headers, said = self.answers.pop(0) if self.answers else (200, {}, b"{}")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_):
        pass


@pytest.fixture
def odd():
    """A server that answers what `odd.answers` says, then 200; `odd.got` is what has come."""
    kind = type("Odd", (Odd,), {"answers": [], "got": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    kind.address = f"http://127.0.0.1:{server.server_port}/join/abc"
    yield kind
    server.shutdown()
    thread.join()
    server.server_close()


WAITS = {
    "its disk is full": (507, {}, b'{"error": "the board\'s disk is full"}', 1, 2),
    "too many tokens": (429, {"Retry-After": "40"}, b"", 40, 41),
    "a stranger": (401, {}, b"", 300, 301),
    "for ever": (503, {"Retry-After": "99999999"}, b"", 300, 301),
    "nonsense": (502, {"Retry-After": "soon"}, b"<html>" * 100, 1, 2),
    "another list": (500, {}, b"[" * 70_000, 1, 2),
    "elsewhere": (302, {"Location": "http://127.0.0.1:9/"}, b"", 1, 2),
}


@pytest.mark.parametrize("answer", WAITS.values(), ids=WAITS)
def test_who_is_refused_waits_and_sends_again(odd, home, answer):
    note(CHECK, True)
    reporter = Reporter(joined(odd.address, home))
    reporter.look()
    odd.answers.append(answer[:3])
    begin = time.monotonic()
    assert reporter.send() is False
    assert begin + answer[3] <= reporter.until <= time.monotonic() + answer[4]
    reporter.until += 1000
    assert reporter.send() is False and len(odd.got) == 1  # not before it is time
    reporter.until = 0.0
    reporter.send()
    assert odd.got[0]["reports"] == odd.got[1]["reports"] and waiting(odd.address) == 0


def test_pauses_grow_and_end_with_the_trouble(odd, home):
    note(CHECK, True)
    reporter = Reporter(joined(odd.address, home))
    reporter.look()
    odd.answers += [(500, {}, b"")] * 9
    pauses = []
    for _ in range(9):
        reporter.until = 0.0
        reporter.send()
        pauses.append(reporter.pause)
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60, 60]
    reporter.until = 0.0
    reporter.send()
    assert reporter.pause == 1


def test_one_report_that_is_refused_does_not_hold_up_the_rest(odd, home):
    note(CHECK, True)
    note(OTHER, True)
    reporter = Reporter(joined(odd.address, home))
    reporter.look()
    bad = (400, {}, b'{"error": "a report (check) is not an object of \xe2\x80\xa6"}')
    odd.answers += [bad, bad]  # both together, then the first alone
    reporter.send()
    assert [len(one["reports"]) for one in odd.got] == [2, 1, 1]
    assert waiting(odd.address) == 0
    with sqlite3.connect(outbox_file(read_address(odd.address).key)) as file:
        ((reason,),) = file.execute("select reason from refused").fetchall()
    assert reason.startswith("a report (check) is not")


def test_more_than_one_message_goes_at_once(odd, home):
    for place in range(2 * reports.AT_ONCE):
        note(f"lab {place}", True)
    reporter = Reporter(joined(odd.address, home))
    reporter.look()
    while reporter.send():
        pass
    assert [len(one["reports"]) for one in odd.got] == [50, 50]


def test_a_learners_full_disk_holds_reports_up(odd, disk, monkeypatch, capsys):
    """The ledger has it; the outbox follows when there is room."""
    monkeypatch.setenv("KINTSUGI_HOME", str(disk))
    note(CHECK, True)
    fill_up(disk / "fill")
    reporter = Reporter(joined(odd.address, disk.parent))
    reporter.look()
    assert reporter.send() is False and not odd.got
    assert "the outbox cannot be written" in capsys.readouterr().err
    (disk / "fill").unlink()
    reporter.look()
    reporter.send()
    assert [one["name"] for one in odd.got[0]["reports"]] == [CHECK]
    reporter.outbox.close()  # else the disk is busy


def test_an_outbox_that_fails_in_the_middle_loses_nothing(odd, home, monkeypatch, capsys):
    """The board has it, and that cannot be written."""
    reporter = Reporter(joined(odd.address, home))
    note(OTHER, True)
    reporter.look()
    note(CHECK, True)
    with monkeypatch.context() as patched:
        error = sqlite3.OperationalError("database or disk is full")
        patched.setattr(Outbox, "note", lambda *_: (_ for _ in ()).throw(error))
        patched.setattr(Outbox, "drop", lambda *_: (_ for _ in ()).throw(error))
        reporter.look()
        reporter.send()
    assert "the outbox cannot be written (database or disk is full)" in capsys.readouterr().err
    reporter.until = 0.0
    reporter.look()
    reporter.send()
    assert waiting(odd.address) == 0
    assert {one["name"] for message in odd.got for one in message["reports"]} == {OTHER, CHECK}


def test_a_ledger_that_cannot_be_read_is_left_alone(odd, home):
    (home / "ledger.json").write_text("{broken")
    reporter = Reporter(joined(odd.address, home))
    reporter.look()
    reporter.send()
    assert odd.got[0]["reports"] == [] and (home / "ledger.json").read_text() == "{broken"
    (home / "ledger.json").unlink()
    note(CHECK, True)
    reporter.look()
    reporter.send()
    assert [one["name"] for one in odd.got[1]["reports"]] == [CHECK]


def test_a_slow_board_is_given_up(home, monkeypatch):
    """It accepts and says nothing."""
    import socket

    monkeypatch.setattr("utils.classroom.join.WAIT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        note(CHECK, True)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/join/abc"
        reporter = Reporter(joined(address, home))
        reporter.look()
        begin = time.monotonic()
        assert reporter.send() is False
        assert time.monotonic() - begin < patience(5) and waiting(address) == 1


def test_the_fixture_of_a_report_is_one():
    assert reports.report(check(1))
