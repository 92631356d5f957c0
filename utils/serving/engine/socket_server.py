"""The engine behind a Unix socket: requests from another process on the same machine.

    server = SocketServer(engine, folder, name)    # in gpt_engine: accepts requests until close()

    -> {"ids": [17, 4], "sampling": {"max_tokens": 8}, "prompt": null, "stream": true, …}
    <- {"ids": [99], "text": " the", "finish": null, …}     a line per chunk, or a single line
    <- {"ids": [3], "text": ".", "finish": "length", …}     or {"error": "CODE: why"}

… stands for prompt_tokens and weights_version, which are the same in all lines of an answer, and
for logprobs, if the sampling requests them. A traced request also has its traceparent.
A connection carries one request, in lines of JSON; closing it cancels the request. The model `gpt`
uses this socket, because calls between models of Triton 24.10 (BLS) can neither cancel nor stream
under load.
"""

import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

from utils.serving.engine import trace
from utils.serving.engine.engine import Engine
from utils.serving.engine.request import BadRequest, SamplingParams, Unavailable

DRAIN = 60.0  # seconds that requests may take to end after the socket is closed


def folder_of(server: int) -> Path:
    """The folder of the sockets of one server's models, named after this user and the server's
    process id."""
    return Path(tempfile.gettempdir(), f"kintsugi-{os.getuid()}-{server}")


class SocketServer:
    """Accepts requests for `engine` on the socket FOLDER/NAME-PID.sock. The PID is in the name
    because an old and a new instance of one version may coexist. Sends at most one chunk per
    request every `pace` seconds."""

    def __init__(self, engine: Engine, folder: Path, name: str, pace: float = 0.0):
        self.engine, self.pace = engine, pace
        self.open = {}  # connection -> Stream
        self.closing = threading.Event()
        self.file = folder / f"{name}-{os.getpid()}.sock"
        self.listener = self._made()
        self.made = self.file.stat().st_mtime_ns
        self.taker = threading.Thread(target=self._take, daemon=True, name="socket server")
        self.taker.start()

    def close(self) -> None:
        """Accept no more requests, and wait for those that are running."""
        self.file.unlink(missing_ok=True)
        self.closing.set()
        self.taker.join()
        end = time.monotonic() + DRAIN
        while self.open and time.monotonic() < end:
            time.sleep(0.02)
        with contextlib.suppress(OSError):
            self.file.parent.rmdir()

    def superseded(self) -> bool:
        """Whether a newer instance of the same version accepts requests on its own socket."""
        others = self.file.parent.glob(f"{self.file.stem.rpartition('-')[0]}-*.sock")
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            return any(other.stat().st_mtime_ns > self.made for other in others)
        return False

    def watch(self) -> None:
        """Cancel the requests whose callers are gone; to be called from time to time."""
        for connection, stream in list(self.open.items()):
            try:
                gone = not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                gone = False  # nothing to read: the caller waits for its answer
            except ConnectionError:
                gone = True
            except OSError:
                gone = False  # closed: the caller has its answer
            if gone and stream is not None:
                stream.cancel()

    def _made(self):
        """The socket. Its file appears only once it listens, so a caller that finds the file can
        connect, unless the engine was killed."""
        beside = self.file.with_suffix(".new")
        for attempt in range(5):
            listener = socket.socket(socket.AF_UNIX)
            try:
                own_folder(self.file.parent)
                listener.bind(str(beside))
                listener.listen(1024)
                beside.rename(self.file)
                listener.settimeout(0.05)
                return listener
            except FileNotFoundError:  # an instance that closed has just removed the folder
                listener.close()
                if attempt == 4:
                    raise

    def _take(self):
        """Accept connections until the socket is closed and all earlier callers are accepted."""
        with self.listener:
            while True:
                closing = self.closing.is_set()  # if so, the file was removed before this wait
                try:
                    connection, _ = self.listener.accept()
                except TimeoutError:
                    if closing:
                        return
                    continue
                self.open[connection] = None
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        try:
            with connection:
                for answer in self._answers(connection):
                    connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:  # the caller is gone
            if stream := self.open.get(connection):
                stream.cancel()
        finally:
            del self.open[connection]

    def _answers(self, connection):
        """The lines to send for a connection's request."""
        try:
            with connection.makefile("rb") as lines:
                request = json.loads(lines.readline())
            sampling = SamplingParams(**request["sampling"])
            context = trace.parse(request.get("traceparent"))
            stream = self.engine.submit(
                request["ids"], sampling, prompt=request["prompt"], context=context
            )
            self.open[connection] = stream
            same = {
                "prompt_tokens": stream.prompt_tokens,
                "weights_version": self.engine.version.number,
            }
            for piece in stream if request["stream"] else [stream.result()]:
                if piece.finish == "cancelled":
                    yield {"error": "CANCELLED: the request was cancelled"}
                    return
                known = {} if sampling.logprobs is None else {"logprobs": piece.logprobs}
                answer = {"ids": piece.tokens, "text": piece.text, "finish": piece.finish}
                yield answer | known | same
                if not piece.finish:  # every chunk wakes up three processes
                    time.sleep(self.pace)
        except BadRequest as error:
            yield {"error": f"INVALID_ARG: {error}"}
        except Unavailable as error:
            yield {"error": f"UNAVAILABLE: {error}"}
        except FloatingPointError as error:
            yield {"error": f"INTERNAL: {error}"}
        except (ValueError, TypeError, KeyError) as error:
            yield {"error": f"INTERNAL: {error!r}"}


def own_folder(folder: Path) -> None:
    """Create the folder, for this user only; remove leftovers of killed servers and engines."""
    for old in folder.parent.glob(f"kintsugi-{os.getuid()}-*"):
        if _dead(old.name):
            shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: remove it")
    for old in folder.glob("*-*.sock"):
        if _dead(old.stem):
            old.unlink(missing_ok=True)


def _dead(name):
    """Whether a name ends with "-" and the id of a process that is gone."""
    process = name.rpartition("-")[2]
    return process.isdigit() and not Path("/proc", process).exists()
