"""The board as a process: access, accepted reports, and what survives when it is killed."""

import contextlib
import csv
import http.client
import re
import signal
import socket
import subprocess
import threading
import time
from urllib.parse import urlsplit

import pytest

from tests.classroom.boards import (
    CHECK,
    GUESS,
    OTHER,
    RunningBoard,
    check,
    command,
    fill_up,
    message,
    prediction,
    until,
)
from tests.patience import patience
from utils.classroom import reports
from utils.classroom.board import WRONG, Guard
from utils.classroom.store import Store, StoreError
from utils.paths import ROOT


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    with RunningBoard(tmp_path_factory.mktemp("board") / "board.sqlite") as board:
        yield board


def others(file, *words):
    """Start a second board, which should fail: (exit status, output)."""
    done = subprocess.run(
        command("--file", file, *words), cwd=ROOT, capture_output=True, text=True,
        timeout=patience(60),
    )
    return done.returncode, done.stderr


# --- reports ----------------------------------------------------------------------------------


def test_what_is_reported_is_on_the_page(board):
    learner = "a" * 32
    first = message(check(), prediction(12.0), alias="first", learner=learner)
    assert board.report(first) == (200, {"taken": 2, "unknown": []})
    row = board.learners()["first"]
    done, tries, at, symptom = row["checks"][CHECK]
    assert (done, tries, symptom) == (False, 1, "rank 0 says 41.") and abs(at - time.time()) < 60
    right = check(done=True, tries=2, symptom="")
    assert board.report(message(right, alias="first", learner=learner))[0] == 200
    assert board.learners()["first"]["checks"][CHECK][:2] == [True, 2]
    assert board.room()[1]["predictions"][GUESS] >= 1


def test_the_results_are_a_table_that_no_spreadsheet_computes(board):
    formula = "=HYPERLINK(1)"
    assert board.report(message(check(symptom=formula), alias="table"))[0] == 200
    status, said, _ = board.ask("GET", "/results.csv", cookie=board.enter())
    rows = list(csv.reader(said.splitlines()))
    assert status == 200 and rows[0] == ["learner", "exercise", "verdict", "tries", "symptom"]
    assert ["table", CHECK, "wrong", "1", f"'{formula}"] in rows


def test_what_comes_again_changes_nothing(board):
    learner = "b" * 32
    again = message(check(), check(name=OTHER), alias="again", learner=learner)
    assert [board.report(again)[1]["taken"] for _ in range(3)] == [2, 0, 0]
    more = message(*again["reports"][:1], check(OTHER, tries=9), alias="again", learner=learner)
    assert board.report(more)[1]["taken"] == 1
    assert board.learners()["again"]["checks"][OTHER][1] == 9


def test_a_clock_that_is_wrong_is_put_right(board):
    yesterday = time.time() - 86_400
    late = message(check(at=yesterday - 60), alias="late")
    board.report({**late, "now": yesterday})
    at = board.learners()["late"]["checks"][CHECK][2]
    assert 50 < time.time() - at < 60 + patience(20)


def test_another_version_of_the_course_is_told_what_is_not_known(board):
    odd = message(check(name="lab 99a of tomorrow"), check(), alias="odd")
    assert board.report(odd) == (200, {"taken": 1, "unknown": ["lab 99a of tomorrow"]})
    assert list(board.learners()["odd"]["checks"]) == [CHECK]


def test_the_page_is_told_of_changes(board):
    connection = http.client.HTTPConnection("127.0.0.1", board.port, timeout=patience(20))
    connection.request("GET", "/events", headers={"Cookie": board.enter()})
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    for _ in range(7):  # retry; event, data; event, data
        answer.readline()
    board.report(message(check(), alias="while it looks"))
    until(lambda: "while it looks" in answer.readline().decode())
    connection.close()


def test_minutes_and_help(board):
    cookie, begin = board.enter(), time.time()
    status, said, _ = board.ask("POST", "/minutes", {"minutes": 45}, cookie=cookie)
    assert status == 200 and 0 <= said["ends"] - begin - 45 * 60 < patience(20)
    assert board.room()[1]["ends"] == said["ends"]
    for bad in (-1, 1e9, "45", True, float("nan")):
        status, said, _ = board.ask("POST", "/minutes", {"minutes": bad}, cookie=cookie)
        assert status == 400, bad
    assert board.ask("POST", "/minutes", {"minutes": None}, cookie=cookie)[0] == 200
    assert board.room()[1]["ends"] is None

    hand = {"kind": "help", "name": "", "question": "Why?", "at": time.time()}
    board.report(message(hand, alias="asks", learner="d" * 32))
    row = board.learners()["asks"]
    assert row["help"][0] == "Why?"
    assert board.ask("POST", "/helped", {"learner": row["id"]}, cookie=cookie)[0] == 200
    assert board.learners()["asks"]["help"] is None
    asking = message(hand, check(), alias="asks", learner="d" * 32)
    assert board.report(asking)[1]["taken"] == 1 and board.learners()["asks"]["help"] is None
    for bad in (10**9, "1", None):
        assert board.ask("POST", "/helped", {"learner": bad}, cookie=cookie)[0] == 400


def test_who_is_removed_stays_away(own):
    said = message(check(), prediction(12.0), alias="loud", learner="e" * 32)
    own.report(said)
    own.report(message(check(), alias="kept"))
    number = own.learners()["loud"]["id"]
    assert own.ask("POST", "/removed", {"learner": number}, cookie=own.enter())[0] == 200
    for _ in range(2):
        assert own.report({**said, "alias": "louder"})[0] == 200  # the lab is not told
        _, news = own.room()
        assert [row["alias"] for row in news["learners"]] == ["kept"] and not news["predictions"]
        own.kill()
        own.start()


# --- access -----------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path):
    with RunningBoard(tmp_path / "board.sqlite", "--minutes", "30") as board:
        yield board


def test_nobody_is_let_in_without_the_right_token(board):
    cookie = board.enter()
    name = cookie.partition("=")[0]
    assert board.ask("GET", "/")[0] == 401  # no token
    tries = [
        ("POST", "/report", {"token": board.open.rpartition("/")[2]}),  # the instructor's token
        ("POST", "/report", {}),
        ("GET", "/board/" + board.token, {}),  # the learners' token
        ("GET", "/join/x", {}),
        ("GET", "/", {"cookie": f"{name}={board.token}"}),
        ("GET", "/events", {}),
        ("GET", "/results.csv", {}),
        ("GET", "/histogram?name=" + GUESS.replace(" ", "%20"), {}),
        ("POST", "/minutes", {"token": board.token}),
        ("POST", "/helped", {}),
        ("POST", "/removed", {}),
    ]
    for method, route, words in tries:
        content = message(check()) if method == "POST" else None
        status, said, _ = board.ask(method, route, content, **words)
        assert (status, said) == (401, {"error": "this token is not known here"}), route
    assert board.ask("GET", "/", cookie=cookie)[0] == 200


def test_a_form_of_another_site_changes_nothing(board):
    words = {"cookie": board.enter(), "Content-Type": "text/plain"}
    assert board.ask("POST", "/minutes", b'{"minutes": 1}', **words)[0] == 415
    headers = board.ask("GET", urlsplit(board.open).path)[2]
    assert re.search(r"HttpOnly;.* SameSite=lax", headers["Set-Cookie"])


def test_wrong_tokens_are_limited_and_right_ones_pass(own):
    """Otherwise one learner in a room, or one seat of a hub, could lock out all the others."""
    cookie = own.enter()
    for _ in range(WRONG):
        assert own.ask("GET", "/join/guess")[0] == 401
    status, said, headers = own.ask("GET", "/join/guess")
    assert (status, said) == (429, {"error": "too many wrong tokens from here: wait a minute"})
    assert 1 <= int(headers["Retry-After"]) <= 61
    assert own.report(message(check()))[0] == own.ask("GET", "/", cookie=cookie)[0] == 200
    assert own.enter() == cookie


def test_a_reverse_proxy_says_who_asks(tmp_path):
    """Only where there is a proxy: elsewhere clients could fake their address."""
    url = "https://board.example.org/class/"
    with RunningBoard(tmp_path / "board.sqlite", "--url", url) as board:
        assert board.join.startswith(url + "join/") and board.open.startswith(url + "board/")
        route = "/board/" + board.open.rpartition("/")[2]
        status, _, headers = board.ask("GET", route)
        assert status == 303 and "Secure" in headers["Set-Cookie"]
        assert headers["Location"] == "../"  # also under a path
        forwarded = {"X-Forwarded-For": "192.0.2.1"}
        for _ in range(WRONG):
            assert board.ask("GET", "/join/guess", **forwarded)[0] == 401
        assert board.ask("GET", "/join/guess", **forwarded)[0] == 429
        assert board.ask("GET", "/join/guess")[0] == 401


def test_without_a_proxy_nobody_can_be_somebody_else(own):
    for place in range(WRONG):
        assert own.ask("GET", "/join/guess", **{"X-Forwarded-For": f"192.0.2.{place}"})[0] == 401
    assert own.ask("GET", "/join/guess")[0] == 429


def test_a_minute_later_they_may_try_again():
    now = [0.0]
    guard = Guard(lambda: now[0])
    for _ in range(WRONG):
        guard.note("here")
    assert guard.seconds("here") == 60 and guard.seconds("there") == 0
    now[0] = 60.0
    assert guard.seconds("here") == 0
    guard.note("here")
    assert guard.seconds("here") == 0
    for number in range(20_000):
        guard.note(str(number))
    assert len(guard.wrong) <= 10_000


def test_the_page_asks_no_other_host(board):
    for route in ("/", "/page.css", "/page.js"):
        status, text, headers = board.ask("GET", route, cookie=board.enter())
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        outside = re.sub(r"http://www\.w3\.org/2000/svg", "", text)  # a namespace, not an address
        assert not re.search(r"(https?:)?//[a-z]", outside.replace("// ", "")), route


# --- invalid reports --------------------------------------------------------------------------


def raw(board, data, seconds=10):
    """Send these bytes; returns the first line of the answer."""
    with socket.create_connection(("127.0.0.1", board.port), timeout=patience(seconds)) as own:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            own.sendall(data)
        return own.recv(4096).partition(b"\r\n")[0].decode()


def test_malformed_and_oversized_requests_have_an_answer(board):
    right = {"token": board.token}
    for content, reason in [
        (b"{", "the body is not JSON"),
        (b"[" * 50_000, "the body is not JSON"),
        (b"[]", "the message is not an object"),
        (message(check(tries=-1)), "tries of a report (check) is not a non-negative integer"),
    ]:
        status, said, _ = board.ask("POST", "/report", content, **right)
        assert status == 400 and reason in said["error"]
    status, said, _ = board.ask("POST", "/report", b" " * (reports.BODY + 1), **right)
    assert (status, said) == (413, {"error": "more than 1,048,576 bytes"})
    head = f"POST /report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {board.token}\r\n"
    endless = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"8000\r\n" + b"x" * 0x8000
    endless += (b"\r\n8000\r\n" + b"x" * 0x8000) * 40
    assert raw(board, endless).startswith("HTTP/1.1 413")
    assert raw(board, b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000).startswith("HTTP/1.1 400")
    assert raw(board, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03").startswith("HTTP/1.1 400")
    assert board.ask("GET", "/none")[0] == 404 and board.ask("GET", "/report")[0] == 405
    assert board.ask("GET", "/histogram?name=x", cookie=board.enter())[0] == 400
    assert board.report(message(check()))[0] == 200


def test_who_sends_slowly_is_answered_and_stops_nobody(board):
    head = f"POST /report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {board.token}\r\n"
    found = []
    slow = threading.Thread(
        target=lambda: found.append(raw(board, f"{head}Content-Length: 99\r\n\r\n{{".encode(), 30))
    )
    slow.start()
    assert board.report(message(check()))[0] == 200 and not found
    slow.join(patience(30))
    assert found[0].startswith("HTTP/1.1 408")


def test_text_of_learners_stays_text(board):
    markup = '<img src=x onerror="alert(1)">'
    assert board.report(message(check(symptom=markup), alias=markup))[0] == 200
    assert board.learners()[markup]["checks"][CHECK][3] == markup  # the page shows it as text
    script = (ROOT / "utils/classroom/page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", script)


# --- kills, second boards, full disks ---------------------------------------------------------


@pytest.mark.thorough
def test_killed_in_the_middle_nothing_is_lost(own):
    """Forty learners report, and send again without an answer, while it is killed three times."""
    learners, each, kills = 40, 12, 3
    answered, going = [0] * learners, threading.Event()

    def learn(place):
        for number in range(1, each + 1):
            one = message(check(tries=number), alias=str(place), learner=f"{place:032x}")
            while True:
                try:
                    if own.report(one)[0] == 200:
                        break
                except (OSError, http.client.HTTPException):
                    time.sleep(0.05)
            answered[place] = number
            going.wait(0.1)

    threads = [threading.Thread(target=learn, args=(place,)) for place in range(learners)]
    for thread in threads:
        thread.start()
    addresses = own.join, own.open
    for part in range(1, kills + 1):
        until(lambda part=part: sum(answered) >= learners * each * part // (kills + 1))
        own.kill()
        own.start()
        assert (own.join, own.open) == addresses
    for thread in threads:
        thread.join(patience(60))
    assert answered == [each] * learners
    rows = own.learners()
    assert sorted(rows, key=int) == [str(place) for place in range(learners)]
    assert all(row["checks"][CHECK][1] == each for row in rows.values())
    assert own.room()[1]["ends"] is not None  # 30 minutes, set at the start


def test_two_boards_are_one_sentence(own, tmp_path):
    status, said = others(tmp_path / "other.sqlite", "--port", own.port)
    assert status == 2 and said == (
        f"utils.classroom: port {own.port} is taken (is a board running already?): make class "
        f"BOARD={own.port + 1}\n"
    )
    status, said = others(own.file, "--port", own.port + 1)
    assert status == 2 and said == (
        f"utils.classroom: another board uses {own.file}: stop it, or name another file\n"
    )
    assert own.report(message(check()))[0] == 200


def test_what_cannot_be_is_one_sentence(tmp_path):
    file = tmp_path / "board.sqlite"
    status, said = others(file, "--host", "192.0.2.77")
    assert status == 2 and "this machine has no address 192.0.2.77" in said
    status, said = others(file, "--url", "board.school")
    assert status == 2 and "--url board.school is not an address" in said
    file.write_text("not a database, and long enough to be looked at " * 9)
    status, said = others(file)
    assert status == 2 and f"{file} cannot be used (file is not a database)" in said
    status, said = others(tmp_path / "board.sqlite" / "x")
    assert status == 2 and "cannot be used (" in said and said.count("\n") == 1


def test_it_listens_on_loopback_alone_unless_told_otherwise(board):
    assert board.join.startswith(f"http://127.0.0.1:{board.port}/join/")
    with socket.socket() as probe:  # the board leaves other loopback addresses free
        probe.bind(("127.0.0.2", board.port))


def test_it_ends_in_good_order_with_a_page_open(own):
    connection = http.client.HTTPConnection("127.0.0.1", own.port, timeout=patience(20))
    connection.request("GET", "/events", headers={"Cookie": own.enter()})
    answer = connection.getresponse()
    answer.readline()
    assert own.kill(signal.SIGINT) == 0
    assert answer.read() is not None
    connection.close()


def test_a_full_disk_is_said_and_reports_come_later(disk):
    with RunningBoard(disk / "board.sqlite") as board:
        fill = disk / "fill"
        assert board.report(message(check(), alias="before"))[0] == 200
        fill_up(fill)
        sent, refused = [], None
        for place in range(2000):  # they fill the last page of its file first
            one = message(check(symptom="x" * 300), alias=f"{place}", learner=f"{place:032x}")
            refused = board.report(one)
            sent.append(one)
            if refused[0] != 200:
                break
        assert refused == (507, {"error": "the board's disk is full: send it again later"})
        told = board.room()[1]
        assert "is full or fails (database or disk is full)" in told["warning"]
        aliases = {row["alias"] for row in told["learners"]}
        assert aliases == {"before", *(one["alias"] for one in sent[:-1])}
        fill.unlink()
        assert board.report(sent[-1]) == (200, {"taken": 1, "unknown": []})
        told = board.room()[1]
        assert told["warning"] == "" and len(told["learners"]) == len(sent) + 1
        board.kill()
        board.start()
        assert len(board.learners()) == len(sent) + 1
        board.kill()


def test_too_many_learners_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.classroom.store.LEARNERS", 2)
    store = Store(tmp_path / "board.sqlite")
    for _ in range(2):
        store.take(message(check()), time.time())
    with pytest.raises(reports.Refused, match="takes no more"):
        store.take(message(check()), time.time())
    assert len(list(store.everything())) == 2
    with pytest.raises(StoreError, match="another board uses"):
        Store(tmp_path / "board.sqlite")
    store.close()
