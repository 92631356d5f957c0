"""The board of a class: `make class [HOST=192.168.1.7] [BOARD=8765] [URL=https://board.school]`.

    python -m utils.classroom --host 192.168.1.7 --port 8765 --title "Monday" --minutes 90

It prints one address for the learners and one for the instructor's browser. Only this machine can
reach it unless --host says otherwise; docs/class.md explains what that means, and how to add TLS.
Ctrl-C stops it. Reports and both addresses stay in its file; a new class gets a new file (--file).
"""

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from utils.classroom.address import address
from utils.classroom.board import Board
from utils.classroom.room import Room
from utils.classroom.store import Store, StoreError
from utils.cli import check_options, exit_status, option, parse_flags
from utils.course import ledger
from utils.course.progress import parts

WAITING = 2048  # connections that may wait to be accepted
GRACE = 3  # seconds for unfinished answers at the end


@dataclass(frozen=True)
class Options:
    """The command's options; `--help` lists them."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's")
    port: int = option(8765, "port to listen on", least=1, most=65535)
    socket: str | None = option(None, "also listen on this Unix socket, for the seats of a hub on "
                                "this machine", metavar="FILE")
    url: str | None = option(None, "address of the reverse proxy in front of this board")
    file: str | None = option(None, "the file of reports (default: board.sqlite next to the "
                              "ledger)", metavar="FILE")
    title: str = option("The class", "the page's title")
    minutes: float | None = option(None, "minutes until the end", least=0, most=1440)

    def __post_init__(self):
        check_options(self)
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url {self.url} is not an address: use https:// or http://")


class Server(uvicorn.Server):
    """Ends the pages' event streams when asked to stop: they would never end by themselves."""

    def __init__(self, config: uvicorn.Config, board: Board) -> None:
        super().__init__(config)
        self.board = board

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.board.close()
        await super().shutdown(sockets)


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket on this address. Raises ValueError, one sentence."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind((host, port))
            own.listen(WAITING)
        except PermissionError:
            raise ValueError(f"port {port} is reserved: choose one above 1023") from None
        except OSError as error:
            if "in use" in str(error):
                raise ValueError(
                    f"port {port} is taken (is a board running already?): make class "
                    f"BOARD={port + 1}"
                ) from None
            raise ValueError(
                f"this machine has no address {host} ({error.strerror}): give one of its own, or "
                "0.0.0.0 for all of them"
            ) from None
        yield own


@contextlib.contextmanager
def listening_too(path: str | None) -> Iterator[list[socket.socket]]:
    """A Unix socket that every user of this machine may use, in a list; [] without a path.

    Raises ValueError, one sentence.
    """
    if path is None:
        yield []
        return
    file, own = Path(path), socket.socket(socket.AF_UNIX)
    with own:
        try:
            if file.is_socket():  # of a killed board: a live one would hold the store
                file.unlink()
            own.bind(path)
            file.chmod(0o666)
            own.listen(WAITING)
        except OSError as error:
            raise ValueError(f"--socket {path} cannot be made ({error.strerror})") from None
        try:
            yield [own]
        finally:
            file.unlink(missing_ok=True)


def say(options: Options, store: Store) -> None:
    """Print both addresses."""
    base = options.url.rstrip("/") if options.url else address(options.host, options.port)
    print(f"Learners start\n\n    make lab CLASS={base}/join/{store.setting('join')}\n")
    print(f"You open\n\n    {base}/board/{store.setting('instructor')}\n")
    if not options.url and options.host.startswith(("127.", "::1", "localhost")):
        print("Only this machine reaches it. For the room: make class HOST=0.0.0.0; docs/class.md.")
    print(f"Reports are kept in {store.path}. Stop with Ctrl-C.", flush=True)


def serve(options: Options) -> None:
    """Serve the board until SIGINT or SIGTERM. Raises ValueError and StoreError."""
    file = Path(options.file).expanduser() if options.file else ledger.home() / "board.sqlite"
    with (
        contextlib.closing(Store(file)) as store,
        listening(options.host, options.port) as own,
        listening_too(options.socket) as others,
    ):
        if options.minutes is not None:
            store.keep("ends", repr(time.time() + 60 * options.minutes))
        secure = (options.url or "").startswith("https://")
        board = Board(store, Room(parts()), options.title, secure=secure)
        config = uvicorn.Config(
            board.application(), loop="asyncio", http="h11", ws="none", lifespan="off",
            log_level="warning", access_log=False,
            server_header=False, date_header=False, timeout_graceful_shutdown=GRACE,
            proxy_headers=options.url is not None,  # else clients could fake their address
            forwarded_allow_ips="127.0.0.1,::1", h11_max_incomplete_event_size=16 * 1024,
        )
        say(options, store)
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
        Server(config, board).run(sockets=[own, *others])
        board.writer.shutdown()


def main(words: list[str]) -> int:
    def run() -> None:
        serve(Options(**parse_flags(Options, words, prog="python -m utils.classroom")))

    return exit_status("utils.classroom", run, (ValueError, StoreError), stopped="stopped")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
