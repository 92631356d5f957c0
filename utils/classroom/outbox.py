"""What the board does not have yet, on the learner's disk, in order, each report with its number.

    outbox = Outbox(path)
    outbox.note(reports.of_ledger(content))     # what differs from before becomes reports
    outbox.first(50)                            # the oldest
    outbox.drop(7)                              # the board has number 7 and all before it

The outbox also remembers what it has noted, so what happened while nobody looked is noted the next
time. A file that is no database any more is kept aside, and all is reported anew from the ledger.
"""

import contextlib
import json
import secrets
import sqlite3
from pathlib import Path

SCHEMA = """
create table if not exists outbox (id text);
create table if not exists known (kind text, name text, body text, primary key (kind, name));
create table if not exists queue
    (number integer primary key autoincrement, kind text, name text, body text);
create table if not exists refused (number integer, body text, reason text);
"""
BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Outbox:
    """The outbox in a file. Every method raises sqlite3.Error where the disk does not take it."""

    def __init__(self, path: Path) -> None:
        try:
            self._open(path)
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode not in BROKEN:
                raise
            path.replace(path.with_suffix(".unreadable"))
            self._open(path)

    def _open(self, path: Path) -> None:
        self.file = sqlite3.connect(path)
        try:
            with self.file:
                self.file.executescript(SCHEMA)
                if not self.file.execute("select id from outbox").fetchone():
                    self.file.execute("insert into outbox values (?)", (secrets.token_hex(16),))
        except BaseException:
            self.file.close()
            raise
        self.id: str = self.file.execute("select id from outbox").fetchone()[0]

    def note(self, states: dict[tuple[str, str], dict]) -> int:
        """Queues what differs from what was noted before; how much that was."""
        rows = self.file.execute("select kind, name, body from known")
        known = {(kind, name): body for kind, name, body in rows}
        now = {key: json.dumps(fields, ensure_ascii=False) for key, fields in states.items()}
        fresh = [(*key, body) for key, body in now.items() if known.get(key) != body]
        if fresh:
            with self.file:  # all of it or nothing
                self.file.executemany("insert or replace into known values (?, ?, ?)", fresh)
                self.file.executemany(
                    "insert into queue (kind, name, body) values (?, ?, ?)", fresh
                )
        return len(fresh)

    def first(self, count: int) -> list[dict]:
        """The oldest reports that the board does not have."""
        rows = self.file.execute("select * from queue order by number limit ?", (count,))
        return [
            {"number": number, "kind": kind, "name": name, **json.loads(body)}
            for number, kind, name, body in rows
        ]

    def drop(self, number: int) -> None:
        """Forgets all up to this number."""
        with self.file:
            self.file.execute("delete from queue where number <= ?", (number,))

    def put_aside(self, reason: str) -> None:
        """Takes the oldest out of the queue: the board does not want it, and says why."""
        with self.file:
            self.file.execute(
                "insert into refused select number, body, ? from queue order by number limit 1",
                (reason,),
            )
            self.file.execute("delete from queue where number = (select min(number) from queue)")

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self.file.close()
