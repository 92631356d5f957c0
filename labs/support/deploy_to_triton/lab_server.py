"""Given: a server that stays, and models that come and go in it.

    version = lab_server.put(lab_server.LEADER, config)                  # a model folder, loaded
    lab_server.Stream(input_ids=[312, 7], max_tokens=[8]).tokens()       # a list
    lab_server.close()                                                   # at the end

The checks of this lab share one server, under explicit model control. It ends with its process.
"""

import ast
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import psutil
import torch
from tokenizers import Tokenizer
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from utils.course.assertions import NotHere, Wrong
from utils.models.gpt import GPT
from utils.paths import ROOT
from utils.serving.server import ServerError, TritonServer, server_available

GIVEN = Path(__file__).resolve().parent / "triton_model"
CHECKPOINT = ROOT / "models" / "small"
NAME = "lab"
SECONDS = 40.0  # until a stream must have ended
LOAD = 90.0  # seconds until a model must be there, longer than its ranks may take (ranks.py)
UNLOAD = 20.0  # seconds until a model must have gone
LEADER = ["model.py", "leader.py", "model_shard.py"]  # what every model of this lab has
RANKS = [*LEADER, "ranks.py", "start_rank.py"]  # and one with a rank.py
PROMPTS = ("The list of", "class Queue:\n    def __init__(self", "import os\n\ndef main():\n")
SETTINGS = """backend: "python"
input { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] }
input { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
input { name: "arrival" data_type: TYPE_INT32 dims: [ 2 ] optional: true }
output { name: "output_ids" data_type: TYPE_INT32 dims: [ -1 ] }
model_transaction_policy { decoupled: true }
instance_group { kind: KIND_MODEL count: 1 }
"""
_here = {"server": None, "channel": None, "folder": None}


# ---- the server and its model


def server() -> TritonServer:
    """The server of this process. Raises NotHere where this machine has none."""
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


def close() -> None:
    """Ends the server; the next check starts another."""
    stop(at_once=False)
    if _here["folder"] is not None:
        shutil.rmtree(_here["folder"], ignore_errors=True)
    _here.update(folder=None)


def stop(at_once: bool = True) -> None:
    """Ends the server. at_once: its model is gone or hangs, and it might wait for it."""
    if _here["channel"] is not None:
        _here["channel"].close()
    if _here["server"] is not None:
        if at_once:
            kill([_here["server"].pid])
        _here["server"].close()
    _here.update(server=None, channel=None)


def put(
    files: list[str], config: str, texts: dict[str, str] | None = None, **others: Path | None
) -> Path:
    """Loads a model made of the given files of triton_model/, of texts ({name: text}) and of other
    files (rank=the answer's path). Returns its version folder. Raises ServerError with the reason.
    """
    take()
    version = repository() / NAME / "1"
    shutil.rmtree(version.parent)
    version.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (version / name).symlink_to(CHECKPOINT / name)
    (version / "utils").symlink_to(ROOT / "utils")  # an export copies what it needs of it
    for name in files:
        shutil.copy(GIVEN / name, version)
    for name, text in (texts or {}).items():
        (version / name).write_text(text)
    for name, path in others.items():
        if path:
            shutil.copy(path, version / f"{name}.py")
    (version.parent / "config.pbtxt").write_text(config)
    load(NAME)
    return version


def load(name: str) -> None:
    """Loads a model. Raises ServerError with the server's reason; where the load does not come to
    an end, Triton would wait forever: the server is ended, and the next use starts another."""
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
    triton, busy = server(), ("READY", "UNLOADING", "LOADING")
    if not triton.states(name, *busy):
        return
    gone = False
    with suppress(ServerError):
        triton.unload(name, seconds=UNLOAD)
        gone = wait_for(lambda: not triton.states(name, *busy), UNLOAD)
    if not gone:
        stop()
        server()


def settings(**parameters: Any) -> str:
    """The config.pbtxt of the lab's model with these parameters: tp, slots, seconds."""
    return SETTINGS + "\n".join(map(parameter, parameters, parameters.values()))


def parameter(key: str, value: Any) -> str:
    """A line of config.pbtxt."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


# ---- requests


class Failed(Exception):
    """The server answered a request with an error."""


class Event(NamedTuple):
    """A response: its tensors by name, or an error's words; last: with the final flag."""

    tensors: dict[str, np.ndarray]
    error: str
    last: bool


class Stream:
    """A request on a gRPC stream of its own: an error on a shared one does not say whose it is.

    inputs: arrays, or lists of int32. status: how the stream has ended, as gRPC calls it.
    """

    def __init__(self, model: str = NAME, seconds: float = 0.0, headers: tuple = (), **inputs: Any):
        request = service_pb2.ModelInferRequest(model_name=model)
        for name, values in inputs.items():
            array = values if isinstance(values, np.ndarray) else np.array(values, np.int32)
            kind = array.dtype.name.upper()
            request.inputs.add(name=name, datatype=kind, shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        address = server().grpc
        if _here["channel"] is None:
            _here["channel"] = grpc.insecure_channel(address)
        infer = service_pb2_grpc.GRPCInferenceServiceStub(_here["channel"]).ModelStreamInfer
        self.seconds, self.status = seconds or SECONDS, "OK"
        self.call = infer(iter([request]), timeout=self.seconds, metadata=headers)

    def events(self) -> Iterator[Event]:
        """What comes, until the stream ends."""
        try:
            for event in self.call:
                response = event.infer_response
                result, names = InferResult(response), [one.name for one in response.outputs]
                last = response.parameters["triton_final_response"].bool_param
                yield Event({name: result.as_numpy(name) for name in names},
                            event.error_message, last)
        except grpc.RpcError as error:
            self.status = error.code().name

    def __iter__(self) -> Iterator[int]:
        """The tokens of the lab's model, as they come. Raises Failed, and Wrong at a silence."""
        for event in self.events():
            if event.error:
                raise Failed(event.error)
            yield from event.tensors.get("output_ids", np.array([], np.int32)).tolist()
        if self.status != "OK":
            raise Wrong(f"a request has not come to its end within {self.seconds:g} s.")

    def tokens(self) -> list[int]:
        return list(self)


# ---- what the answers are compared with


@functools.cache
def prompt(number: int) -> tuple[int, ...]:
    """Tokens of one of PROMPTS."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return tuple(tokenizer.encode(PROMPTS[number % len(PROMPTS)]).ids)


@functools.cache
def model() -> GPT:
    """The whole model, fp32."""
    torch.set_num_threads(1)  # it is so small that a second thread would only be waited for
    return GPT.from_pretrained(CHECKPOINT, dtype=torch.float32)


@functools.cache
def right(number: int, count: int = 48) -> tuple[int, ...]:
    """The tokens that the whole model says after a prompt: GPT.generate, greedily."""
    tokens = prompt(number)
    made = model().generate(torch.tensor([tokens]), count, temperature=0)
    return tuple(made[0, len(tokens) :].tolist())


def lines_of(path: Path) -> list[dict]:
    """A file of lines of JSON, such as the steps that a shard has written down ("diary-0")."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether `condition()` becomes true within so many seconds."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the processes that are still there (and not only waiting to be buried)."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found += [pid] * (psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return found


def kill(pids: Iterable[int]) -> None:
    """What an answer left behind."""
    for pid in alive(pids):
        os.kill(pid, 9)


def not_started(path: Path) -> None:
    """Raises NotImplementedError with the first task of the file that is still to be done, so that
    no server has to start for it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Raise):
            call = node.body[-1].exc
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "NotImplementedError":
                raise NotImplementedError(ast.literal_eval(call.args[0]))
