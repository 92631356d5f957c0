"""Requests in flight and processes to disturb, for the tests of a server's faults.

    asked = Asked(stream, Client(server), "def ", max_tokens=9)     # in a thread of its own
    asked.wait_for_piece();  asked.outcome()                        # the answer, or the ServeError
    with frozen(*ranks(server)): ...            # stopped meanwhile: requests stay in flight
    check_leaving(server, ask)          # ask() begins an answer and returns a function that leaves
    at_rest(server);  processes(server);  memory(server)

Repositories and views into servers are in `world.py`. No check relies on sleeping.
"""

import asyncio
import os
import re
import signal
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.serving.processes import PATIENCE, alive, parent, until
from tests.serving.world import kintsugi, ranks
from utils.serving.client import ServeError

MODELS = ["gpt", "gpt_engine", "gpt_tokenize", "gpt_detokenize"]


# ---- processes


def processes(server):
    """{pid: command line} of the server and of all processes below it."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = parent(folder.name)
    found = {server.pid}
    while more := {pid for pid, above in parents.items() if above in found} - found:
        found |= more
    words = {}
    for pid in filter(alive, sorted(found)):
        with suppress(OSError):
            words[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return words


def gone(pids):
    """Whether all of these processes have ended."""
    return not any(map(alive, pids))


@contextmanager
def frozen(*pids):
    """Stop processes, and continue those that still exist at the end."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def memory(server):
    """Bytes held by the server and its descendants (PSS: shared memory counts once)."""
    total = 0
    for pid in processes(server):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += 1024 * int(re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[1])
    return total


def served_now(server):
    """Requests in the engine, in a slot or waiting for one."""
    now = kintsugi(server)
    return now["requests_running"] + now["queue_waiting"]


def at_rest(server):
    """Whether the engine has no request and no part of its cache in use."""
    return served_now(server) == 0 and kintsugi(server)["kv_use"] == 0


# ---- requests: door(client, ...) yields the pieces of an answer; closing it early disconnects


def generate(client, text, **parameters):
    yield client.generate(text, **parameters)


def stream(client, text, **parameters):
    yield from client.stream(text, **parameters)


def astream(client, text, **parameters):
    """The asynchronous stream as an ordinary one; closing it cancels."""
    loop = asyncio.new_event_loop()
    answers = client.astream(text, **parameters)
    try:
        while True:
            yield loop.run_until_complete(anext(answers))
    except StopAsyncIteration:
        return
    finally:
        loop.run_until_complete(answers.aclose())
        loop.close()


def tokens(client, ids, **parameters):
    for some in client.tokens(ids, **parameters):
        yield tuple(some)


def check_leaving(server, ask, requests=1):
    """A client that leaves mid-answer cancels `requests` requests and frees what they held.

    Nothing else can end them: the ranks are stopped. If on a busy machine the answer ends before
    the ranks stop, try again.
    """

    def cancelled():
        return kintsugi(server)["requests_cancelled_total"]

    for _ in range(4):
        until(lambda: at_rest(server))
        wanted = cancelled() + requests
        standing, leave = ranks(server), ask()
        with frozen(*standing):
            leave()
            with suppress(AssertionError):
                until(lambda wanted=wanted: cancelled() == wanted, PATIENCE / 4)
                until(lambda: at_rest(server))
                return
    pytest.fail("no request of a departed client was cancelled")


class Asked(threading.Thread):
    """A request in flight, through one of these doors."""

    def __init__(self, door, client, *arguments, **parameters):
        super().__init__(daemon=True)
        self.pieces, self.error = [], None
        self.begun = threading.Event()
        self._answers = door(client, *arguments, **parameters)
        self.start()

    def run(self):
        try:
            for piece in self._answers:
                self.pieces.append(piece)
                self.begun.set()
        except Exception as error:
            self.error = error
        finally:
            self._answers.close()
            self.begun.set()

    def wait_for_piece(self):
        assert self.begun.wait(PATIENCE), "no answer has begun"

    def outcome(self):
        """The whole answer, or the ServeError; any other exception is raised."""
        self.join(PATIENCE)
        assert not self.is_alive(), "the request does not end"
        if self.error is not None:
            if not isinstance(self.error, ServeError):
                raise self.error
            return self.error
        first = self.pieces[:1]
        return "".join(self.pieces) if first and isinstance(first[0], str) else sum(self.pieces, ())
