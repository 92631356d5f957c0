"""Given: a server that stays, and models that come and go in it.

    version = lab_server.put(lab_server.LEADER, config)                  # a model folder, loaded
    lab_server.Stream(input_ids=[312, 7], max_tokens=[8]).events()       # what comes
    lab_server.close()                                                   # at the end

The checks of this lab share one server, under explicit model control. It ends with its process.
"""

import ast
import functools
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as grpc
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from utils.course.assertions import NotHere
from utils.models.gpt import GPT
from utils.paths import ROOT
from utils.serving.server import ServerError, TritonServer, server_available

GIVEN = Path(__file__).resolve().parent / "triton_model"
CHECKPOINT = ROOT / "models" / "small"
NAME = "lab"
SECONDS = 40.0  # until a stream must have ended
LOAD = 90.0  # seconds until a model must be there, longer than its ranks may take (ranks.py)
UNLOAD = 10.0  # seconds until a model must have gone
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
_here = {"server": None, "folder": None}


# ---- the server and its model


def server() -> TritonServer:
    """The server of this process. Raises NotHere where this machine has none."""
    if _here["server"] is not None and not _here["server"].alive():
        stop()
    if _here["server"] is None:
        if reason := server_available():
            raise NotHere(reason)
        _here["server"] = TritonServer(repository(), models=[], quiet=True, exit_seconds=3)
        Finalize(None, close, exitpriority=10)
    return _here["server"]


def repository() -> Path:
    """The model repository, gone when the server is closed; with a model in it: it must have
    one."""
    if _here["folder"] is None:
        _here["folder"] = Path(tempfile.mkdtemp(prefix="lab16-"))
        (_here["folder"] / NAME).mkdir()
        (_here["folder"] / NAME / "config.pbtxt").write_text('backend: "python"\n')
    return _here["folder"]


def close() -> None:
    """Ends the server; the next check starts another."""
    stop(at_once=False)
    if _here["folder"] is not None:
        shutil.rmtree(_here["folder"], ignore_errors=True)
    _here["folder"] = None


def stop(at_once: bool = True) -> None:
    """Ends the server. at_once: its model hangs, and it might wait for it."""
    if _here["server"] is not None:
        with suppress(ProcessLookupError):
            if at_once:
                os.kill(_here["server"].pid, signal.SIGKILL)
        _here["server"].close()
    _here["server"] = None


def put(files: list[str], config: str, **others: Path | None) -> Path:
    """Loads a model made of the given files of triton_model/ and of others (rank=the answer's
    path). Returns its version folder. Raises ServerError with the reason."""
    take(NAME)
    version = repository() / NAME / "1"
    shutil.rmtree(version.parent)
    version.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (version / name).symlink_to(CHECKPOINT / name)
    (version / "utils").symlink_to(ROOT / "utils")  # an export copies what it needs of it
    places = {name: GIVEN / name for name in files} | {f"{one}.py": others[one] for one in others}
    for name, path in places.items():
        if path:
            shutil.copy(path, version / name)
    (version.parent / "config.pbtxt").write_text(config)
    load(NAME)
    return version


def load(name: str) -> None:
    """Loads a model. Raises ServerError with the server's reason; where the load does not come to
    an end, Triton would wait forever: the server is ended, and the next use starts another."""
    try:
        server().load(name, seconds=LOAD)
    except ServerError as error:
        if "does not answer" not in str(error):
            raise
        stop()
        raise ServerError(
            f"the model is not loaded after {LOAD:g} s. Does its initialize come to an end?"
        ) from None


def take(name: str) -> None:
    """Unloads a model, if it is loaded. That waits until every request has ended, and a wrong
    answer may never end one: then the server is ended."""
    try:
        if server().states(name, "READY", "UNLOADING"):
            server().unload(name, seconds=UNLOAD)
    except ServerError:
        stop()


def settings(**parameters: Any) -> str:
    """The config.pbtxt of the lab's model with these parameters: tp, slots, seconds."""
    return SETTINGS + "\n".join(map(parameter, parameters, parameters.values()))


def parameter(key: str, value: Any) -> str:
    """A line of config.pbtxt."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


# ---- requests


class Stream:
    """A request to the lab's model, sent at once on a gRPC stream of its own: an error on a shared
    one does not say whose it is. inputs: arrays, or lists of int32."""

    def __init__(self, seconds: float = SECONDS, headers: dict | None = None, **inputs: Any):
        self._found, self._client, tensors = [], grpc.InferenceServerClient(server().grpc), []
        for name, values in inputs.items():
            array = values if isinstance(values, np.ndarray) else np.array(values, np.int32)
            tensor = grpc.InferInput(name, array.shape, array.dtype.name.upper())
            tensors.append(tensor.set_data_from_numpy(array))
        self._client.start_stream(
            lambda result, error: self._found.append(error or result), seconds, headers
        )
        self._client.async_stream_infer(NAME, tensors, enable_empty_final_response=True)

    def events(self) -> list[grpc.InferResult | InferenceServerException]:
        """What comes, until the stream ends; in the end an error of gRPC, if that ends it."""
        self._client.stop_stream()
        self._client.close()
        return self._found


def late(event: grpc.InferResult | InferenceServerException) -> bool:
    """Whether a stream's time has passed."""
    return isinstance(event, InferenceServerException) and "DEADLINE" in str(event.status())


# ---- what the answers are compared with


@functools.cache
def prompt(number: int) -> tuple[int, ...]:
    """Tokens of one of PROMPTS."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return tuple(tokenizer.encode(PROMPTS[number]).ids)


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


def not_started(path: Path) -> None:
    """Raises NotImplementedError with the first task of the file that is still to be done, so that
    no server has to start for it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and "NotImplementedError(" in ast.unparse(node):
            raise NotImplementedError(ast.literal_eval(node.exc.args[0]))
