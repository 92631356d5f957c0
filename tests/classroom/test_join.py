"""Joining: nothing is reported without a yes, and a learner is asked once per class."""

import json
import stat
import subprocess
import sys

import pytest

from tests.browser.jupyterlab import free_port
from tests.classroom.boards import RunningBoard, environment
from tests.patience import patience
from utils.classroom.join import JoinError, join, memberships, read_address
from utils.paths import ROOT


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    file = tmp_path_factory.mktemp("board") / "board.sqlite"
    with RunningBoard(file, "--title", "Monday") as board:
        yield board


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def answers(*said):
    """A terminal that gives these answers, then closes; its questions are in `.asked`."""
    left, asked = list(said), []

    def ask(question):
        asked.append(question)
        if not left:
            raise EOFError
        return left.pop(0)

    ask.asked = asked
    return ask


@pytest.mark.parametrize("said", [(), ("",), ("no",), ("maybe", "owl"), ("yes",)])
def test_no_answer_is_a_no(board, home, said, capsys):
    assert join(board.join, answers(*said)) is None
    assert capsys.readouterr().out.endswith("Nothing will be reported.\n")
    assert not home.exists()


def test_yes_and_an_alias_are_asked_once(board, home, capsys):
    ask = answers("yes", "x" * 41, "  my  owl ")
    member = join(board.join, ask)
    assert member.alias == "my owl" and len(member.learner) == 32
    out = capsys.readouterr().out
    assert "Class: Monday\n" in out and "This alias is not a text of 1 to 40 characters." in out
    for told in ("the names of the labs' checks", "your predictions", "no code, no file"):
        assert told in out
    assert stat.S_IMODE((home / "class.json").stat().st_mode) == 0o600
    assert join(board.join + "/", answers()) == read_again(member, board.join + "/")
    assert "This lab reports to the class as my owl" in capsys.readouterr().out
    other = board.join[:-4] + "none"
    with pytest.raises(JoinError, match=r"does not know this CLASS: copy it again\.$"):
        join(other, answers("yes", "owl"))
    assert len(memberships()) == 1


def read_again(member, address):
    return type(member)(address, member.alias, member.learner)


def test_enter_takes_the_alias_that_is_offered(board):
    ask = answers("y", "")
    assert f"Your alias [{join(board.join, ask).alias}]: " == ask.asked[1]


def test_a_board_that_is_away_does_not_stop_a_learner(capsys):
    member = join("http://127.0.0.1:9/join/abc", answers("yes", "owl"))
    assert member.alias == "owl"
    assert "The board does not answer now" in capsys.readouterr().out


def test_a_class_that_moves_is_the_same_class(board):
    first = join(board.join, answers("yes", "owl"))
    moved = join(board.join.replace("127.0.0.1", "localhost"), answers())
    assert moved.learner == first.learner and "localhost" in moved.address


@pytest.mark.parametrize(
    "text",
    ["", "board", "127.0.0.1:8765/join/a", "http://x:99999/join/a", "ftp://x/join/a",
     "http://x/board/a", "http://me@x/join/a", "http:///join/a", "http://[x/join/a",
     "http://x/join/a b"],
)
def test_what_is_no_address_is_one_sentence(text):
    with pytest.raises(JoinError, match="is not the address of a class: copy the"):
        read_address(text)


@pytest.mark.parametrize(
    "text, known",
    [
        ("http://1.2.3.4:8765/join/a-b_c", (False, "1.2.3.4", 8765, "", "a-b_c")),
        ("https://board.school/class/join/abc/", (True, "board.school", 443, "/class", "abc")),
        ("http://[::1]:80/join/a", (False, "::1", 80, "", "a")),
    ],
)
def test_addresses(text, known):
    found = read_address(text)
    assert (found.secure, found.host, found.port, found.path, found.token) == known


@pytest.mark.parametrize("cut, said", [(4, "does not know this CLASS"), (99, "is not the address")])
def test_make_lab_with_a_wrong_address_is_one_sentence(board, home, cut, said):
    words = ["--port", str(free_port()), "--class", board.join[:-cut] or "x"]
    done = subprocess.run(
        [sys.executable, "-m", "utils.workshop.lab", *words], cwd=ROOT, env=environment(home),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=patience(60),
    )
    assert done.returncode == 1 and done.stdout == ""
    assert said in done.stderr and done.stderr.count("\n") == 1 and not home.exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(board, tmp_path, monkeypatch):
    (tmp_path / "flat").write_text("")
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "flat"))
    with pytest.raises(JoinError, match=r"cannot be written \(.*\): set KINTSUGI_HOME"):
        join(board.join, answers("yes", "owl"))


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', "\udcff"])
def test_a_damaged_file_of_classes_counts_as_none(board, home, content):
    home.mkdir()
    (home / "class.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert join(board.join, answers()) is None
    key = read_address(board.join).key
    (home / "class.json").write_text(json.dumps({key: {"alias": "owl"}}))
    assert join(board.join, answers("yes", "lynx")).alias == "lynx"
