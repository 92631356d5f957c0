"""The board's data, in one SQLite file in WAL mode: it is on the disk before the board answers.

    store = Store(path)                     # StoreError: another board has it, the disk is full, …
    store.take(reports.message(body))       # StoreError, Full
    store.everything()

Only one thread at a time may use it. A message is kept as a whole or not at all.
"""

import contextlib
import fcntl
import json
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from utils.classroom.reports import Refused

LEARNERS = 20_000  # at most; otherwise anyone with the join address could fill the disk
LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # none looks like another on a projector

SCHEMA = """
create table if not exists settings (name text primary key, value text);
create table if not exists people (
    id integer primary key, learner text unique not null, alias text not null, seen real not null
);
create table if not exists said (
    learner integer, kind text, name text, body text, at real, helped integer,
    primary key (learner, kind, name)
) without rowid;
"""


class StoreError(Exception):
    """The file cannot be used. The message is one sentence that names the fix."""


class Full(StoreError):
    """The disk is full or fails."""


class Taken(NamedTuple):
    """A message's changes. learner: its number on the board; reports: the new ones."""

    learner: int
    alias: str
    seen: float
    reports: list[dict]


class Store:
    """The board's file, exclusive to this process until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = open(path.with_name(path.name + ".lock"), "w")  # noqa: SIM115
        except OSError as error:
            raise StoreError(
                f"{path} cannot be used ({error.strerror}): name another file"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise StoreError(f"another board uses {path}: stop it, or name another file") from None
        except OSError:  # some network file systems have no locks
            pass
        try:
            with self._errors():
                self.file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                self.file.execute("pragma journal_mode = wal")
                self.file.execute("pragma synchronous = full")  # a crash of the machine, too
                self.file.executescript(SCHEMA)
                with self._changes():
                    for name, token in (
                        ("join", "".join(secrets.choice(LETTERS) for _ in range(12))),
                        ("instructor", secrets.token_urlsafe(24)),
                    ):
                        self.file.execute(
                            "insert or ignore into settings values (?, ?)", (name, token)
                        )
            path.chmod(0o600)  # it holds the tokens
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self.file.close()
        self._lock.close()

    def setting(self, name: str) -> str | None:
        """A stored text, or None."""
        with self._errors():
            row = self.file.execute("select value from settings where name = ?", (name,)).fetchone()
        return row and row[0]

    def keep(self, name: str, value: str | None) -> None:
        """Store a text under a name; None deletes it."""
        with self._errors(), self._changes():
            self.file.execute("insert or replace into settings values (?, ?)", (name, value))

    def take(self, message: dict, now: float) -> Taken:
        """Store the new reports of a message. Raises Refused if there are too many learners."""
        with self._errors(), self._changes():
            return self._take(message, now)

    def _take(self, message: dict, now: float) -> Taken:
        ask = self.file.execute
        row = ask("select id from people where learner = ?", (message["learner"],)).fetchone()
        if row is None:
            if ask("select count(*) from people").fetchone()[0] >= LEARNERS:
                raise Refused(f"this board has {LEARNERS:,} learners and takes no more")
            row = ask(
                "insert into people (learner, alias, seen) values (?, '', 0) returning id",
                (message["learner"],),
            ).fetchone()
        (number,) = row
        rows = ask("select kind, name, body from said where learner = ?", (number,))
        known = {(kind, name): body for kind, name, body in rows}
        fresh = []
        for report in message["reports"]:
            body, at = json.dumps(report), report.get("at")
            if known.get((report["kind"], report["name"])) == body:
                continue
            if at is not None:  # by our clock; nothing happened later than now
                at = min(max(at + now - message["now"], 0.0), now)
            ask(
                "insert or replace into said values (?, ?, ?, ?, ?, 0)",
                (number, report["kind"], report["name"], body, at),
            )
            fresh.append(_by_our_clock(report, at))
        ask("update people set alias = ?, seen = ? where id = ?", (message["alias"], now, number))
        return Taken(number, message["alias"], now, fresh)

    def helped(self, learner: int) -> None:
        """Clear a learner's request for help, as the instructor has answered it."""
        with self._errors(), self._changes():
            self.file.execute(
                "update said set helped = 1 where learner = ? and kind = 'help'", (learner,)
            )

    def everything(self) -> Iterator[Taken]:
        """All learners, each with the latest report of each name."""
        with self._errors():
            said: dict[int, list] = {}
            rows = self.file.execute("select learner, body, at from said where not helped")
            for learner, body, at in rows:
                said.setdefault(learner, []).append(_by_our_clock(json.loads(body), at))
            learners = "select id, alias, seen from people order by id"
            for row in self.file.execute(learners):
                yield Taken(*row, said.get(row[0], []))

    @contextlib.contextmanager
    def _changes(self) -> Iterator[None]:
        """A transaction: all changes or none."""
        self.file.execute("begin immediate")
        try:
            yield
            self.file.execute("commit")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have done so
                self.file.execute("rollback")
            raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name == "SQLITE_FULL" or name.startswith("SQLITE_IOERR"):
                raise Full(f"the disk of {self.path} is full or fails ({error})") from None
            raise StoreError(
                f"{self.path} cannot be used ({error}): name another file, or repair this one"
            ) from None


def _by_our_clock(report: dict, at: float | None) -> dict:
    return report | ({"at": at} if "at" in report else {})
