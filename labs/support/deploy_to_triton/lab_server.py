"""Given: a server that stays, and models that come and go in it.

    version = lab_server.put(lab_server.LEADER, config)                  # a model folder, loaded
    with lab_server.Stream(input_ids=[312, 7], max_tokens=8) as answer:
        answer.all()                                                     # the tokens, one by one
    lab_server.close()                                                   # at the end

The checks of this lab share one server, under explicit model control. It ends with its process.
"""

import ast
import functools
import json
import os
import queue
import shutil
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np

from utils.course.assertions import NotHere, Wrong
from utils.paths import ROOT
from utils.ranks.supervise import OVER, Child, end, supervised
from utils.serving.server import ServerError, TritonServer, server_available

GIVEN = Path(__file__).resolve().parent / "triton_model"
CHECKPOINT = ROOT / "models" / "small"
NAME = "lab"
START = 60.0  # seconds until torch must have been imported
SECONDS = 30.0  # until the next token must have come
LOAD = 90.0  # seconds until a model must be there, longer than its ranks may take (ranks.py)
UNLOAD = 20.0  # seconds until a model must have gone
LEADER = ["model.py", "leader.py", "model_shard.py"]  # what every model of this lab has
RANKS = [*LEADER, "ranks.py"]  # and one with a rank.py
PROMPTS = ("The list of", "class Queue:\n    def __init__(self", "import os\n\ndef main():\n")
_here = {"server": None, "folder": None, "loaded": None, "sent": 0, "forkserver": None}


# ---- the server and its model


def server() -> TritonServer:
    """The server of this process. Raises NotHere where there is none for this machine."""
    if _here["server"] is not None and not _here["server"].alive():
        stop()
    if _here["server"] is None:
        reason = server_available()
        if reason:
            raise NotHere(reason)
        _here["server"] = TritonServer(repository(), models=[], quiet=True, exit_seconds=3)
        Finalize(None, close, exitpriority=10)
    return _here["server"]


def folder() -> Path:
    """A temporary folder, gone when the server is closed."""
    if _here["folder"] is None:
        _here["folder"] = Path(tempfile.mkdtemp(prefix="lab16-"))
    return _here["folder"]


def repository() -> Path:
    """The model repository, with at least one model in it."""
    lab = folder() / "repository" / NAME
    if not lab.exists():
        lab.mkdir(parents=True)
        (lab / "config.pbtxt").write_text('backend: "python"\n')
    return lab.parent


def forkserver() -> Path:
    """The socket of the process whose forks are the ranks of all models; see start_rank.py."""
    address = folder() / "forkserver"
    if _here["forkserver"] is None:
        command = [sys.executable, str(GIVEN / "start_rank.py"), str(address)]
        with (folder() / "forkserver.log").open("wb") as log:
            _here["forkserver"] = Child(supervised(command), output=log)
        if not wait_for(address.exists, START):
            end([_here["forkserver"]], OVER)
            _here["forkserver"] = None
            said = (folder() / "forkserver.log").read_text(errors="replace").strip()
            raise ServerError(f"the ranks' process is not ready after {START:g} s: {said[-300:]}")
    return address


def close() -> None:
    """Ends the server; the next check starts another."""
    if _here["server"] is not None:
        _here["server"].close()
    if _here["forkserver"] is not None:
        end([_here["forkserver"]], OVER)
    if _here["folder"] is not None:
        shutil.rmtree(_here["folder"], ignore_errors=True)
    _here.update(server=None, folder=None, loaded=None, forkserver=None)


def stop() -> None:
    """Ends a server whose model is gone or hangs: it might wait for it. The next use starts one."""
    if _here["server"] is not None:
        kill([_here["server"].pid])
        _here["server"].close()
    _here.update(server=None, loaded=None)


def put(files, config: str, texts=None, **others: Path) -> Path:
    """Loads a model made of the given files of triton_model/, of texts ({name: text}) and of other
    files (rank=the answer's path). Returns its version folder.

    Where only scheduler.py is another one, the model stays loaded: it reads that file itself.
    Raises ServerError with the server's reason.
    """
    server()
    version = repository() / NAME / "1"
    kind = (tuple(files), config) if set(others) == {"scheduler"} else None
    if kind and kind == _here["loaded"]:
        clear()
    else:
        take()
        shutil.rmtree(version.parent)
        version.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (version / name).symlink_to(CHECKPOINT / name)
        (version / "utils").symlink_to(ROOT / "utils")  # an export copies what it needs of it
        for name in files:
            shutil.copy(GIVEN / name, version)
        if files is RANKS:
            (version / "forkserver").symlink_to(forkserver())
        for name, text in (texts or {}).items():
            (version / name).write_text(text)
        (version.parent / "config.pbtxt").write_text(config)
    for name, path in others.items():
        shutil.copy(path, version / f"{name}.tmp")
        (version / f"{name}.tmp").replace(version / f"{name}.py")
    if not kind or kind != _here["loaded"]:
        load(NAME)
        _here.update(loaded=kind, sent=0)
    return version


def load(name: str) -> None:
    """Loads a model. Raises ServerError with the server's reason; where the load does not come to
    an end, Triton would wait for ever: the server is ended, and the next use starts another."""
    triton = server()
    try:
        triton.load(name, seconds=LOAD)
    except ServerError:
        loading = True  # as long as the server does not say otherwise
        with suppress(ServerError):
            loading = bool(triton.states(name, "LOADING"))
        if triton.alive() and not loading:
            raise
        stop()
        raise ServerError(
            f"the model is not loaded after {LOAD:g} s. Does its initialize come to an end?"
        ) from None


def take(name: str = NAME) -> None:
    """Unloads a model, if it is loaded. A server in which that takes too long is ended: an unload
    waits until every request has ended, and a wrong answer may never end one."""
    triton = server()
    if name == NAME:
        if _here["loaded"]:
            clear()
        _here["loaded"] = None
    busy = ("READY", "UNLOADING", "LOADING")
    if not triton.states(name, *busy):
        return
    try:
        triton.unload(name, seconds=UNLOAD)
        gone = wait_for(lambda: not triton.states(name, *busy), UNLOAD)
    except ServerError:
        gone = False
    if not gone:
        stop()
        server()


def kill_leader(version: Path) -> None:
    """Kills the process of the model, as a fault would."""
    kill([int(pid) for pid in (version / "stubs").read_text().split()])


def wait_for_all() -> None:
    """Waits until the model has got all requests that were sent to it."""
    come = repository() / NAME / "1" / "come"
    if not wait_for(lambda: come.exists() and come.stat().st_size >= _here["sent"], SECONDS):
        raise Silence("requests that were sent have not come to the model.")


def clear() -> None:
    """Waits until all that was sent to the model has come there, and ends it."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        sent = _here["sent"] + 1
        try:
            with Stream(input_ids=[1], arrival=[0, 0, 0]) as answer:
                answer.all()
        except Failed as error:
            if f"cleared after {sent} requests" in str(error):
                return
        time.sleep(0.05)
    stop()
    raise Wrong("the model of the check before has not come to an end. Run this check again.")


def told(path: str = "") -> dict:
    """What the server says of the model: "" its metadata, "/config" its configuration."""
    url = f"http://{server().http}/v2/models/{NAME}{path}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def settings(tp: int, slots: int = 4, seconds: float = 20.0) -> str:
    """A config.pbtxt, made from what it has to say."""
    lines = ['backend: "python"', "max_batch_size: 0"]
    for kind, tensors in CONTRACT.items():
        for name, (dims, optional) in tensors.items():
            rest = " optional: true" if optional else ""
            lines.append(f'{kind} {{ name: "{name}" data_type: TYPE_INT32 dims: {dims}{rest} }}')
    lines.append("model_transaction_policy { decoupled: true }")
    lines.append("instance_group { kind: KIND_MODEL count: 1 }")
    for key, value in {"tp": tp, "slots": slots, "seconds": seconds}.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    return "\n".join(lines)


CONTRACT = {  # {tensor: (dims, optional)}
    "input": {"input_ids": ([-1], False), "max_tokens": ([1], True), "arrival": ([3], True)},
    "output": {"output_ids": ([-1], False)},
}


# ---- requests


class Failed(Exception):
    """The server answered a request with an error."""


class Silence(Wrong):
    """Nothing comes any more."""


class Stream:
    """A request on a gRPC stream of its own. Iterating gives the tokens, as they come.

    Raises Failed with the server's words, Wrong where nothing comes for SECONDS.
    """

    def __init__(self, **inputs):
        import tritonclient.grpc as grpc

        self.responses, self.tokens, self.counts, self.ended = queue.Queue(), [], [], False
        self.client = grpc.InferenceServerClient(server().grpc)
        self.client.start_stream(lambda result, error: self.responses.put((result, error)))
        tensors = []
        for name, values in inputs.items():
            tensor = grpc.InferInput(name, [len(values)], "INT32")
            tensor.set_data_from_numpy(np.array(values, np.int32))
            tensors.append(tensor)
        _here["sent"] += 1
        self.client.async_stream_infer(NAME, tensors, enable_empty_final_response=True)

    def __iter__(self):
        while True:
            try:
                result, error = self.responses.get(timeout=SECONDS)
            except queue.Empty:
                raise Silence(
                    f"a request has {len(self.tokens)} tokens, and for {SECONDS:.0f} s nothing has "
                    "come: neither a token nor the end."
                ) from None
            if error is not None:
                self.ended = True
                raise Failed(error.message() or str(error))
            ids = result.as_numpy("output_ids")
            if ids is not None and ids.size:
                self.counts.append(ids.size)
                self.tokens += ids.tolist()
                yield from ids.tolist()
            if result.get_response().parameters["triton_final_response"].bool_param:
                self.ended = True
                return

    def all(self) -> list[int]:
        for _ in self:
            pass
        return self.tokens

    def cancel(self):
        """The client has gone: its stream is broken off."""
        self.client.stop_stream(cancel_requests=True)

    def close(self):
        """Ends it, also if it has not come to its end."""
        self.client.stop_stream(cancel_requests=not self.ended)
        self.client.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


# ---- what the answers are compared with


@functools.cache
def model():
    import torch

    from utils.models.gpt import GPT

    torch.set_num_threads(1)  # it is so small that a second thread would only be waited for
    return GPT.from_pretrained(CHECKPOINT, dtype=torch.float32)


@functools.cache
def prompt(number: int) -> tuple[int, ...]:
    """Tokens of one of PROMPTS."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return tuple(tokenizer.encode(PROMPTS[number % len(PROMPTS)]).ids)


@functools.cache
def right(number: int, count: int) -> tuple[int, ...]:
    """The tokens that the whole model says after a prompt: GPT.generate, greedily."""
    import torch

    if count < 48:
        return right(number, 48)[:count]
    tokens = prompt(number)
    made = model().generate(torch.tensor([tokens]), count, temperature=0)
    return tuple(made[0, len(tokens) :].tolist())


def diary(version: Path, rank: int = 0) -> list[dict]:
    """What the shard of a rank has written down: its steps."""
    path = version / f"diary-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def alive(pids) -> list[int]:
    """Those of the processes that are still there (and not only waiting to be buried)."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found


def wait_for(condition, seconds: float) -> bool:
    """Whether `condition()` becomes true within so many seconds."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def not_started(path: Path) -> None:
    """Raises NotImplementedError with the first task of the file that is still to be done, so that
    no server has to start for it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Raise):
            exception = node.body[-1].exc
            if isinstance(exception, ast.Call) and ast.unparse(exception.func) == (
                "NotImplementedError"
            ):
                raise NotImplementedError(ast.literal_eval(exception.args[0]))


def kill(pids) -> None:
    """What an answer left behind."""
    for pid in alive(pids):
        os.kill(pid, 9)
