"""A board as `make class` runs it, a scripted learner, and what the instructor's page receives."""

import contextlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from urllib.parse import urlsplit

from tests.browser.jupyterlab import free_port
from tests.patience import patience
from utils.paths import ROOT

CHECK, OTHER = "lab 01b ring all-reduce", "lab 02c noise scale"
GUESS = "01 bytes each rank sends"


def command(*words):
    return [sys.executable, "-m", "utils.classroom", *map(str, words)]


class RunningBoard:
    """A context manager: a board on a file, in its own process."""

    def __init__(self, file, *words, port=None):
        self.file, self.words, self.port = file, words, port or free_port()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self):
        """Start or restart the board; returns when it has printed its addresses."""
        self.process = subprocess.Popen(
            command("--port", self.port, "--file", self.file, *self.words),
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        self.said = []
        for line in self.process.stdout:
            self.said.append(line.strip())
            if "Ctrl-C" in line:
                break
        else:
            raise AssertionError("\n".join(self.said))
        self.join = next(s for s in self.said if "CLASS=" in s).partition("CLASS=")[2]
        self.open = next(s for s in self.said if "/board/" in s)
        self.token = self.join.rpartition("/")[2]

    def kill(self, sign=signal.SIGKILL):
        self.process.send_signal(sign)
        code = self.process.wait(patience(20))
        self.process.stdout.close()
        return code

    def ask(self, method, route, content=None, *, token=None, cookie=None, **headers):
        """Send a request; returns (status, decoded JSON or text, headers)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience(10))
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if cookie:
            headers["Cookie"] = cookie
        body = content
        if content is not None and not isinstance(content, bytes):
            body = json.dumps(content).encode()
            headers.setdefault("Content-Type", "application/json")
        connection.request(method, route, body, headers)
        answer = connection.getresponse()
        said = answer.read().decode()
        connection.close()
        try:
            return answer.status, json.loads(said), answer.headers
        except ValueError:
            return answer.status, said, answer.headers

    def enter(self):
        """The instructor's cookie."""
        status, _, headers = self.ask("GET", urlsplit(self.open).path)
        assert status == 303 and headers["Location"] == "../"
        return headers["Set-Cookie"].partition(";")[0]

    def room(self):
        """The first two events that a new page receives: (the class, the room)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience(10))
        connection.request("GET", "/events", headers={"Cookie": self.enter()})
        answer = connection.getresponse()
        assert answer.status == 200, answer.status
        found = []
        while len(found) < 2:
            line = answer.readline().decode()
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
        connection.close()
        return found

    def learners(self):
        """The page's rows, {alias: row}, with checks by name."""
        told, news = self.room()
        names = [name for part in told["course"] for name in part["checks"]]
        rows = {row["alias"]: row for row in news["learners"]}
        for row in rows.values():
            row["checks"] = {names[int(place)]: said for place, said in row["checks"].items()}
        return rows

    def report(self, message):
        return self.ask("POST", "/report", message, token=self.token)[:2]


def check(name=CHECK, **more):
    fields = {"done": False, "tries": 1, "symptom": "rank 0 says 41.", "at": time.time()} | more
    return {"kind": "check", "name": name, **fields}


def prediction(value, name=GUESS, **more):
    fields = {"value": value, "unit": "MB", "late": False, "theory": None, "measured": None} | more
    return {"kind": "prediction", "name": name, **fields}


def message(*reports, alias="gentle otter", learner=None):
    return {
        "learner": learner or secrets.token_hex(16), "alias": alias,
        "now": time.time(), "reports": list(reports),
    }


def until(condition, seconds=30.0):
    """Wait until `condition()` is true; returns its result."""
    end = time.monotonic() + patience(seconds)
    while not (found := condition()):
        assert time.monotonic() < end, f"still not true after {patience(seconds)} s"
        time.sleep(0.05)
    return found


def fill_up(file):
    """Write to a file until its disk is full."""
    with contextlib.suppress(OSError), open(file, "wb", buffering=0) as out:
        while True:
            out.write(bytes(4096))


def environment(home, **more):
    return {**os.environ, "KINTSUGI_HOME": str(home), "OMP_NUM_THREADS": "1", **more}
