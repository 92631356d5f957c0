"""The engine behind a Unix socket: requests of another process of the same machine.

    server = SocketServer(engine, folder, name)    # in gpt_engine: takes requests until its close()

    -> {"ids": [17, 4], "sampling": {"max_tokens": 8}, "prompt": null, "stream": true, …}
    <- {"ids": [99], "text": " the", "finish": null, …}     a line for each chunk, or one for all
    <- {"ids": [3], "text": ".", "finish": "length", …}     or {"error": "CODE: why"}

… stands for what is the same in all lines of an answer, prompt_tokens and weights_version, and for
logprobs, where the sampling asks for them. A request that is traced has its traceparent with it.
One connection is one request, in lines of JSON; who closes it cancels. The model `gpt` comes this
way: calls between models of Triton 24.10 (BLS) can neither cancel nor stream under load.
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

DRAIN = 60.0  # seconds that requests may take to end once the socket is closed


def folder_of(server: int) -> Path:
    """Where the sockets of the models of one server are: a folder of this user, by the server's
    process id."""
    return Path(tempfile.gettempdir(), f"kintsugi-{os.getuid()}-{server}")


class SocketServer:
    """Takes requests for `engine` at the socket FOLDER/NAME-PID.sock, as an old and a new instance
    of one version may be there together; at most one chunk of each request in `pace` seconds."""

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
        """No more requests; waits for those that are here."""
        self.file.unlink(missing_ok=True)
        self.closing.set()
        self.taker.join()
        end = time.monotonic() + DRAIN
        while self.open and time.monotonic() < end:
            time.sleep(0.02)
        with contextlib.suppress(OSError):
            self.file.parent.rmdir()

    def superseded(self) -> bool:
        """Whether a newer instance of the same version takes requests at a socket of its own."""
        others = self.file.parent.glob(f"{self.file.stem.rpartition('-')[0]}-*.sock")
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            return any(other.stat().st_mtime_ns > self.made for other in others)
        return False

    def watch(self) -> None:
        """Cancels the requests whose caller has gone; to be called now and then."""
        for connection, stream in list(self.open.items()):
            try:
                gone = not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                gone = False  # nothing to read: it waits for its answer
            except ConnectionError:
                gone = True
            except OSError:
                gone = False  # closed: it has its answer
            if gone and stream is not None:
                stream.cancel()

    def _made(self):
        """The socket; who finds its file finds somebody behind it, or an engine that was killed."""
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
        """Until the socket is closed and everybody is in who came before."""
        with self.listener:
            while True:
                closing = self.closing.is_set()  # the file was gone before this wait
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
        except OSError:  # the caller has gone
            if stream := self.open.get(connection):
                stream.cancel()
        finally:
            del self.open[connection]

    def _answers(self, connection):
        """What is sent for the request that a connection brings."""
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
                if not piece.finish:  # every chunk costs three processes a wake-up
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
    """Makes the folder, for this user only; removes what killed servers and engines left."""
    for old in folder.parent.glob(f"kintsugi-{os.getuid()}-*"):
        if _dead(old.name):
            shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else: remove it")
    for old in folder.glob("*-*.sock"):
        if _dead(old.stem):
            old.unlink(missing_ok=True)


def _dead(name):
    """Whether a name ends with "-" and the id of a process that is gone."""
    process = name.rpartition("-")[2]
    return process.isdigit() and not Path("/proc", process).exists()
