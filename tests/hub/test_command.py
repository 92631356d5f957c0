"""`make hub` with a learner by hand: seats start, end, are culled, and go with the hub; and what it
says where it cannot start."""

import os
import re
import subprocess
import sys

import psutil
import pytest
import requests

from tests.classroom.boards import until
from tests.hub.hubs import CAN_LIMIT, GIT, RunningHub, need_seats
from tests.patience import patience
from utils.hub.__main__ import Options, alone, check_machine
from utils.hub.seat import COPY, SeatError


class Visitor:
    """A learner's browser, by hand."""

    def __init__(self, hub, name, password="a-long-word"):
        self.hub, self.name, self.session = hub, name, requests.Session()
        self.ask("GET", "/hub/login")
        answer = self.ask("POST", "/hub/login", data={"username": name, "password": password})
        assert answer.status_code == 200, answer.text

    def ask(self, method, route, **more):
        token = self.session.cookies.get("_xsrf", path="/hub/")
        return self.session.request(
            method, f"{self.hub.address}{route}", params={"_xsrf": token} if token else None,
            timeout=patience(30), **more,
        )  # fmt: skip

    def open(self):
        """Takes a seat, as the log-in does too; waits until JupyterLab answers there."""
        self.ask("GET", "/hub/spawn")
        until(lambda: f"/user/{self.name}/lab" in self.ask("GET", f"/user/{self.name}/lab").url, 60)

    def server(self):
        """What the hub says of the seat; None without one."""
        return self.ask("GET", f"/hub/api/users/{self.name}").json()["servers"].get("")


def command_lines(hub):
    """Of the walls around this hub's seats, while they stand."""
    found = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [line for line in found if line.startswith("bwrap") and str(hub.folder) in line]


@pytest.fixture(scope="module")
def hub():
    need_seats()
    with RunningHub("--idle", "0.2") as hub:
        yield hub


@pytest.mark.timeout(120)
def test_a_seat_that_nobody_uses_ends_and_opens_again_as_it_was(hub):
    ada = Visitor(hub, "ada")
    ada.open()
    home = hub.folder / "homes" / "ada"
    assert (home / "kintsugi" / "README.md").is_file()
    (home / "kintsugi" / "README.md").write_text("mine")
    assert ada.server()["ready"] and command_lines(hub)
    until(lambda: ada.server() is None, 60)  # 12 s without a request
    assert not command_lines(hub)
    (hub.course / "NEWS").write_text("new")
    who = ["-c", "user.name=Instructor", "-c", "user.email=instructor@example.org"]
    for words in (["add", "."], [*who, "commit", "-qm", "News"]):
        subprocess.run([*GIT, "-C", str(hub.course), *words], check=True)
    ada.open()
    assert (home / "kintsugi" / "NEWS").read_text() == "new"
    assert (home / "kintsugi" / "README.md").read_text() == "mine"


@pytest.mark.timeout(120)
def test_a_seat_that_ends_at_once_is_told_at_once(hub):
    """And not after the time that JupyterHub gives a start."""
    away = hub.course.rename(hub.course.with_name("away"))
    hub.course.mkdir()
    try:
        dora = Visitor(hub, "dora")
        shown = "The seat of dora ended at once"
        until(lambda: shown in dora.ask("GET", "/hub/spawn-pending/dora").text, 30)
        assert str(COPY) in hub.said()  # is not there, says JupyterLab
    finally:
        hub.course.rmdir()
        away.rename(hub.course)


@pytest.mark.timeout(120)
def test_a_second_hub_on_the_same_folder_or_port_says_so_and_ends(hub):
    with (
        pytest.raises(ValueError, match=r"has a hub already: stop that one first$"),
        alone(hub.folder),
    ):
        pass
    with pytest.raises(SeatError if os.geteuid() == 0 else ValueError):
        check_machine(Options(port=hub.port))


@pytest.mark.timeout(120)
def test_nothing_is_left_of_a_hub_that_ends_or_is_killed(hub):
    eve = Visitor(hub, "eve")
    eve.open()
    assert command_lines(hub)
    sockets = set(re.findall(r"/tmp/kintsugi-\w+", " ".join(command_lines(hub))))
    hub.stop()
    until(lambda: not command_lines(hub))
    assert sockets and not any(os.path.exists(folder) for folder in sockets)


# --- where it cannot start ------------------------------------------------------------------------


@pytest.mark.skipif(not CAN_LIMIT, reason="only root is root")
def test_it_does_not_run_as_root():
    command = [sys.executable, "-m", "utils.hub"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 2
    assert done.stderr.startswith("utils.hub: The hub does not run as root: make a user for it")


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"port": 80}, "--port 80 is too small: it takes 1024 or more"),
        ({"memory": 0.0}, "--memory 0.0 must be above 0"),
        ({"config": "/nowhere"}, "--config /nowhere is no file: name one, or leave it out"),
    ],
)
def test_bad_options_are_named(options, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Options(**options)
