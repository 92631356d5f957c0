"""`make hub` with a scripted learner: seats start, end, are culled and end with the hub; and the
messages when it cannot start."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import types

import psutil
import pytest

from tests.classroom.boards import RunningBoard, until
from tests.hub.hubs import CAN_LIMIT, GIT, RunningHub, need_seats
from tests.hub.visitor import CLASS_PASSWORD, Visitor
from tests.patience import patience
from utils.classroom.board import WRONG
from utils.hub.__main__ import Options, alone, check_machine, settings
from utils.hub.seat import SeatError

pytestmark = pytest.mark.thorough


def visit(hub, name):
    """A learner with a running seat."""
    learner = Visitor(hub.address, name)
    learner.log_in()
    learner.wait()
    return learner


def command_lines(hub):
    """The command lines of this hub's processes, except its own."""
    signs, found = (str(hub.place), str(hub.port)), []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.pid != hub.process.pid and any(sign in line for sign in signs):
            found.append(line)
    return found


def seats(hub):
    """The number of seats' sandboxes."""
    return sum(line.startswith("bwrap") for line in command_lines(hub))


@pytest.fixture(scope="module")
def hub():
    need_seats()
    with tempfile.NamedTemporaryFile("w") as word:  # not in pytest's folder, which is closed
        os.chmod(word.name, 0o644)
        print(CLASS_PASSWORD, file=word, flush=True)
        idle = ["--idle", str(patience(20) / 60)]  # long enough for a seat in use
        with RunningHub(*idle, "--class-password", word.name) as hub:
            yield hub


@pytest.mark.parametrize(
    "name, password, word, reason",
    [
        ("ada@home", "a-long-word", CLASS_PASSWORD, "a name has 1 to 31 of the letters a to z"),
        ("a'b$(id)", "a-long-word", CLASS_PASSWORD, "This name is not valid"),
        ("x" * 32, "a-long-word", CLASS_PASSWORD, "This name is not valid"),
        ("Ünal", "a-long-word", CLASS_PASSWORD, "This name is not valid"),
        ("eve", "short", CLASS_PASSWORD, "at least 7 characters"),
        ("eve", "x" * 73, CLASS_PASSWORD, "at most 72 bytes"),
        ("eve", "a-long-word", "", "A new name needs the class password"),
        ("eve", "a-long-word", "open barley", "A new name needs the class password"),
    ],
)
def test_a_name_or_password_that_is_refused_has_its_reason(hub, name, password, word, reason):
    answer = Visitor(hub.address, name, password).ask_in(word)
    assert answer.status_code == 403 and reason in answer.text.partition('"login_error"')[2]


@pytest.mark.timeout(120)
def test_the_login_page_says_how_and_wrong_passwords_are_limited_by_name(hub):
    page = Visitor(hub.address, "").hub("GET", "login").text
    for words in ("A new name is a new account", "1 to 31 of the letters", "Class password"):
        assert words in page
    assert Visitor(hub.address, "fay").ask_in().ok
    for _ in range(WRONG):
        answer = Visitor(hub.address, "fay", "a-wrong-word").ask_in()
        assert "Invalid username or password" in answer.text
    answer = Visitor(hub.address, "fay").ask_in()
    assert answer.status_code == 403 and "wait a minute" in answer.text
    assert Visitor(hub.address, "gus").ask_in().ok


@pytest.mark.timeout(240)
def test_a_seat_that_nobody_uses_ends_and_opens_again_as_it_was(hub):
    ada = visit(hub, "ada")
    home = hub.folder / "homes" / "ada"
    assert "01 data parallel" in (home / "kintsugi" / "you_are_here.md").read_text()
    (home / "kintsugi" / "README.md").write_text("mine")
    assert "01 data parallel" in ada.run("!make -C ~/kintsugi progress")
    assert seats(hub)
    until(lambda: not ada.server(), 90)  # idle for 20 s, noticed within 10 s
    until(lambda: not seats(hub))
    (hub.course / "NEWS").write_text("new")
    who = ["-c", "user.name=Instructor", "-c", "user.email=instructor@example.org"]
    for words in (["add", "."], [*who, "commit", "-qm", "News"]):
        subprocess.run([*GIT, "-C", str(hub.course), *words], check=True)
    ada.start()
    assert (home / "kintsugi" / "NEWS").read_text() == "new"
    assert (home / "kintsugi" / "README.md").read_text() == "mine"


@pytest.mark.timeout(120)
def test_a_seat_that_ends_at_once_is_told_at_once(hub):
    """Not only at JupyterHub's time limit for a start."""
    away = (hub.course / ".git").rename(hub.course / "away")
    try:
        dora, shown = Visitor(hub.address, "dora"), "The seat of dora ended at once"
        dora.log_in()
        until(lambda: shown in dora.hub("GET", "spawn-pending/dora").text)
        assert f"file://{hub.course}" in hub.said()  # git's message
    finally:
        away.rename(hub.course / ".git")


@pytest.mark.timeout(120)
def test_a_second_hub_on_the_same_folder_or_port_says_so_and_ends(hub):
    with (
        pytest.raises(ValueError, match=r"is used by another hub: stop that first$"),
        alone(hub.folder),
    ):
        pass
    with pytest.raises(SeatError if os.geteuid() == 0 else ValueError):
        check_machine(Options(port=hub.port))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM"])
def test_nothing_is_left_of_a_hub_that_ends_or_is_killed(end):
    need_seats()
    with RunningHub() as hub:
        visit(hub, "eve")
        assert len(command_lines(hub)) >= 4  # sandbox, JupyterLab, proxy, culler
        (sockets,) = set(re.findall(rf"{hub.place}/kintsugi-\w+", " ".join(command_lines(hub))))
        if end == "SIGKILL":
            hub.process.kill()
        else:
            assert hub.stop() == 0
            assert not os.path.exists(sockets)
        until(lambda: not command_lines(hub))


# Runs in a kernel: a learner's actions in a terminal and in a cell.
JOIN = """
import subprocess
from utils.course import ask_for_help
words = ["make", "-C", "/home/learner/kintsugi", "lab", "CLASS={address}"]
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
lab = subprocess.Popen(words, **pipes)
lab.stdin.write("yes\\nowl\\n"); lab.stdin.close()
for line in lab.stdout:
    print(line, end="")
    if line.startswith("Leave"): break
ask_for_help("which ring?")
"""
LEAVE = """
import time
from utils.course import ask_for_help, ledger
!pkill -HUP -f utils.workshop.lab  # its terminal is closed
while ledger.alias(): time.sleep(0.1)
ask_for_help("again")
"""


@pytest.mark.timeout(120)
def test_the_lab_of_a_seat_joins_a_class(tmp_path):
    """A seat has no network; the board on the same machine has a socket."""
    need_seats()
    with tempfile.TemporaryDirectory(prefix="board-") as place:
        os.chmod(place, 0o755)
        file, way = tmp_path / "board.sqlite", f"{place}/board.sock"
        with RunningBoard(file, "--socket", way) as board, RunningHub("--board", place) as hub:
            ada = visit(hub, "ada")
            assert "This is a seat of a hub" in ada.run("!make -C ~/kintsugi lab")
            said = ada.run(JOIN.format(address=board.join))
            assert "The class" in said and "The instructor sees that owl asks for help." in said
            until(lambda: "owl" in board.learners())
            until(lambda: (board.learners()["owl"]["help"] or [""])[0] == "which ring?")
            assert "is not in a class" in ada.run(LEAVE)
            board.kill(signal.SIGTERM)
            assert not os.path.exists(way)


# --- refusals to start ----------------------------------------------------------------------------


@pytest.mark.skipif(not CAN_LIMIT, reason="needs root")
def test_it_does_not_run_as_root():
    command = [sys.executable, "-m", "utils.hub"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 2
    assert done.stderr.startswith("utils.hub: The hub does not run as root: make a user for it")


def test_places_and_addresses_hold_wherever_they_are_read(tmp_path, monkeypatch):
    """The hub changes into its folder, and the culler needs the proxy's address."""
    monkeypatch.chdir(tmp_path)
    options = Options(folder="data", course="course", host="192.0.2.7", port=8002, seats=40)
    c = settings(options, "main", tmp_path, [])
    assert c.JupyterHub.active_server_limit == 40
    memory = types.SimpleNamespace(total=128 << 30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert Options().most_seats == 37  # docs/class/hub.md
    assert c.JupyterHub.db_url == f"sqlite:///{tmp_path}/data/hub.sqlite"
    assert (c.Seat.course, c.Seat.homes) == (f"{tmp_path}/course", f"{tmp_path}/data/homes")
    assert "http://192.0.2.7:8002/hub/api" in c.JupyterHub.services[0]["command"]


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"port": 80}, "--port 80 is too small: it takes 1024 or more"),
        ({"memory": 0.0}, "--memory 0.0 must be above 0"),
        ({"config": "/nowhere"}, "--config /nowhere is not a file: name one, or omit the option"),
        (
            {"class_password": "/nowhere"},
            "--class-password /nowhere is not a readable file with a password: write one into it, "
            "or omit the option",
        ),
        *(
            ({"domain": domain}, f"--domain {domain} is not a domain: use one like "
             "hub.example.org, or https://hub.example.org if a proxy has the certificate")
            for domain in ("192.0.2.7", "hub", "hub.example.org:8001", "ftp://hub.example.org")
        ),
    ],
)
def test_bad_options_are_named(options, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Options(**options)
