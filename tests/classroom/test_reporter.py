"""A lab reports everything, later if necessary, and is never disturbed by it."""

import http.server
import json
import signal
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
    until,
)
from tests.patience import patience
from utils.classroom import reports
from utils.classroom.join import Membership, read_address
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
    """A member of the class, written to class.json."""
    member = Membership(address, alias, learner)
    key = read_address(address).key
    (home / "class.json").write_text(json.dumps({key: vars(member)}))
    return member


class Beside:
    """The reporter process, as `make lab CLASS=…` starts it."""

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
        """End its lab; returns its stderr."""
        return self.process.communicate(timeout=patience(20))[1]


# --- with a board -----------------------------------------------------------------------------


def test_checks_predictions_and_questions_report_themselves(board, home):
    note(CHECK, False, "rank 0 says 41.")  # before joining
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
        assert "the board has everything" in beside.end()
        assert beside.process.returncode == 0


def test_a_board_that_is_away_gets_it_all_later(board, home):
    joined(board.join, home)
    board.kill()
    with Beside(board.join, home) as beside:
        note(CHECK, False, "symptom")
        note(OTHER, True)
        board.start()
        until(lambda: board.learners().get("owl", {}).get("checks"))
        assert board.learners()["owl"]["checks"].keys() == {CHECK, OTHER}
        board.kill()
        note(CHECK, True)
        assert "the board does not answer" in beside.end()
    board.start()
    with Beside(board.join, home):  # the lab's next start
        until(lambda: board.learners()["owl"]["checks"][CHECK][0])


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
        self.got.append(reports.message(body))  # raises unless it is a message
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
    """A server that gives the answers in `odd.answers`, then 200; `odd.got` has the messages."""
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
    odd.answers.append(answer[:3])
    begin = time.monotonic()
    reporter.send()
    assert begin + answer[3] <= reporter.until <= time.monotonic() + answer[4]
    reporter.until += 1000
    reporter.send()
    assert len(odd.got) == 1  # it is too early
    reporter.until = 0.0
    note(OTHER, True)
    reporter.send()
    assert [len(one["reports"]) for one in odd.got] == [1, 2]
    reporter.send()
    assert len(odd.got) == 2  # the board has it already


def test_pauses_grow_and_end_with_the_trouble(odd, home):
    note(CHECK, True)
    reporter = Reporter(joined(odd.address, home))
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


def test_a_ledger_that_cannot_be_read_is_left_alone(odd, home):
    (home / "ledger.json").write_text("{broken")
    reporter = Reporter(joined(odd.address, home))
    reporter.send()
    assert odd.got[0]["reports"] == [] and (home / "ledger.json").read_text() == "{broken"
    (home / "ledger.json").unlink()
    note(CHECK, True)
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
        begin = time.monotonic()
        reporter.send()
        assert time.monotonic() - begin < patience(5) and reporter.sent is None


def test_the_fixture_of_a_report_is_one():
    assert reports.report(check())
