"""A learner joins a class: `make lab CLASS=http://192.168.1.7:8765/join/TOKEN`.

Before anything is reported, `join` says what would be reported and asks; no answer means no. Alias
and address are kept in `class.json` next to the ledger, under a key made from the token: the
learner is asked once per class, wherever its board moves.
"""

import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import secrets
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from utils.classroom import reports
from utils.course import ledger

# In a seat of a hub, which has no network: the socket of the same machine's board (make hub).
WAY = Path("/run/board/board.sock")
WAIT = 5.0  # seconds that a board may take to answer
KINDS = ("gentle", "golden", "quick", "quiet", "brave", "clever", "merry", "sunny", "calm", "wild")
ANIMALS = ("otter", "heron", "lynx", "finch", "badger", "crane", "marten", "seal", "owl", "hare")

TERMS = """
This lab would report to the board of a class on {where}:

  - an alias that you choose (no name is needed),
  - the names of the labs' checks that you run: done or not, how often you tried, when, and the
    first line of the last symptom,
  - your predictions, with the theory and the measurement that the lesson shows,
  - a question, when you call ask_for_help().

This includes what is in your ledger already. Nothing else is reported: no code, no file, neither
your name nor this machine's. Reports stop when you start `make lab` without CLASS.
"""


class JoinError(Exception):
    """One sentence that names the problem and its fix."""


class Away(Exception):
    """The board did not answer. The text says why."""


class _SocketConnection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(WAY))


@dataclass(frozen=True)
class Address:
    """The board's location. path: the part before /join/, "" or "/class"."""

    secure: bool
    host: str
    port: int
    path: str
    token: str

    @property
    def key(self) -> str:
        """The key of this class in class.json."""
        return hashlib.sha256(self.token.encode()).hexdigest()[:12]

    def ask(self, method: str, route: str, content: dict | None = None) -> tuple[int, dict, str]:
        """(status, content, Retry-After) of an answer. No proxy is used, no redirect followed.

        Raises Away.
        """
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        kind = _SocketConnection if WAY.exists() else kind
        connection = kind(self.host, self.port, timeout=WAIT)
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}
        body = None
        if content is not None:
            body = json.dumps(content, ensure_ascii=False).encode()
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, f"{self.path}{route}", body, headers)
            answer = connection.getresponse()
            said = answer.read(reports.BODY)
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            raise Away(str(error) or type(error).__name__) from None
        finally:
            connection.close()
        try:
            found = json.loads(said)
        except (ValueError, RecursionError):
            found = {}
        found = found if isinstance(found, dict) else {}
        return answer.status, found, answer.headers.get("Retry-After", "")


def read_address(text: str) -> Address:
    """Parse the address that the instructor's machine prints. Raises JoinError."""
    parts = None
    with contextlib.suppress(ValueError):  # not a port
        parts = urlsplit(text.strip())
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
        found = re.fullmatch(r"(.*)/join/([\w-]+)/?", parts.path)
        if port and parts.hostname and found and not parts.username:
            return Address(parts.scheme == "https", parts.hostname, port, found[1], found[2])
    raise JoinError(
        f"CLASS={text} is not the address of a class: copy the one on the instructor's screen, "
        "http://…/join/…"
    )


@dataclass(frozen=True)
class Membership:
    """A learner of a class: the board tells learners apart by `learner`, people by `alias`."""

    address: str
    alias: str
    learner: str


def memberships() -> dict[str, dict]:
    """{key of a class: a membership's fields} for all classes that this ledger has joined."""
    try:
        found = json.loads((ledger.home() / "class.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def join(text: str, ask: Callable[[str], str] = input) -> Membership | None:
    """Join the class at this address, or find it joined; None if the learner did not agree.

    ask: shows a question and returns the answer; EOFError counts as none.
    Raises JoinError for a wrong address or a folder that cannot be written.
    """
    address = read_address(text)
    try:
        status, content, _ = address.ask("GET", f"/join/{address.token}")
    except Away as error:
        print(f"The board does not answer now ({error}). Reports wait here and are sent later.")
    else:
        if status in (401, 404):
            raise JoinError(f"The board on {address.host} does not know this CLASS: copy it again.")
        if status == 200 and isinstance(content.get("class"), str):
            print(f"Class: {content['class'][:100]!s}")
    known, before = memberships(), None
    if address.key in known:
        with contextlib.suppress(TypeError):
            before = Membership(**known[address.key])
    if before is None:
        before = _agreed(address, ask)
        if before is None:
            print("Nothing will be reported.")
            return None
    member = Membership(text.strip(), before.alias, before.learner)
    if known.get(address.key) != vars(member):
        _keep({**known, address.key: vars(member)})
    print(f"This lab reports to the class as {member.alias}; make lab without CLASS does not.")
    return member


def _agreed(address: Address, ask: Callable[[str], str]) -> Membership | None:
    print(TERMS.format(where=f"{address.host}:{address.port}"))
    with contextlib.suppress(EOFError):
        if ask("Do you agree? yes or no [no]: ").strip().lower() not in ("y", "yes"):
            return None
        offer = f"{random.SystemRandom().choice(KINDS)} {random.SystemRandom().choice(ANIMALS)}"
        alias = None
        while alias is None:
            wanted = " ".join(ask(f"Your alias [{offer}]: ").split()) or offer
            try:
                alias = reports.alias(wanted)
            except reports.Refused as error:
                print(f"This alias {error}.")
        return Membership("", alias, secrets.token_hex(16))
    return None


def _keep(content: dict) -> None:
    path = ledger.home() / "class.json"
    beside = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(content, file, indent=1)
        beside.replace(path)
    except OSError as error:
        raise JoinError(
            f"{path} cannot be written ({error.strerror}): set KINTSUGI_HOME to another folder."
        ) from None
