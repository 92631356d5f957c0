"""Given: a server that keeps running while models are loaded and unloaded.

    lab_server.put(config, model="model.py")                             # a model folder, loaded
    lab_server.Stream(input_ids=[312, 7], max_tokens=[8]).events()       # its responses
    lab_server.close()                                                   # at the end

The checks of this lab share one server, under explicit model control. It ends with their process.
"""

import os
import shutil
import signal
import tempfile
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from labs.support.inference_engine.streams import fill
from utils.course.assertions import NotHere
from utils.serving.server import ServerError, TritonServer, server_available

GIVEN = Path(__file__).resolve().parent / "triton_model"
NAME = "lab"
SECONDS = 40.0  # within which a stream must end
LOAD = 90.0  # seconds within which a model must load, longer than its ranks may take (ranks.py)
UNLOAD = 10.0  # seconds within which a model must unload
_here = {"server": None, "folder": None}


# ---- the server and its model


def server() -> TritonServer:
    """The server of this process. Raises NotHere if Triton is not available."""
    if _here["server"] is not None and not _here["server"].alive():
        stop()
    if _here["server"] is None:
        if reason := server_available():
            raise NotHere(reason)
        _here["server"] = TritonServer(repository(), models=[], quiet=True, exit_seconds=3)
        Finalize(None, close, exitpriority=10)
    return _here["server"]


def repository() -> Path:
    """The model repository, deleted when the server is closed. It must contain a model, so one is
    put in."""
    if _here["folder"] is None:
        _here["folder"] = Path(tempfile.mkdtemp(prefix="lab17-"))
        (_here["folder"] / NAME).mkdir()
        (_here["folder"] / NAME / "config.pbtxt").write_text('backend: "python"\n')
    return _here["folder"]


def close() -> None:
    """End the server; the next check starts another."""
    stop(at_once=False)
    if _here["folder"] is not None:
        shutil.rmtree(_here["folder"], ignore_errors=True)
    _here["folder"] = None


def stop(at_once: bool = True) -> None:
    """End the server. at_once: kill it, because it might wait for a model that hangs."""
    if _here["server"] is not None:
        with suppress(ProcessLookupError):
            if at_once:
                os.kill(_here["server"].pid, signal.SIGKILL)
        _here["server"].close()
    _here["server"] = None


def put(config: str, *files: Path, **answers: Path) -> Path:
    """Load a model made of given files and of answers (model=its path). Return its version
    folder. Raises ServerError with the reason."""
    take(NAME)
    version = repository() / NAME / "1"
    shutil.rmtree(version.parent)
    version.mkdir(parents=True)
    fill(version, files, **answers)
    (version.parent / "config.pbtxt").write_text(config)
    load(NAME)
    return version


def load(name: str) -> None:
    """Load a model. Raises ServerError with the server's reason. If the load never finishes, Triton
    would wait forever: the server is ended, and the next use starts another."""
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
    """Unload a model, if it is loaded. Unloading waits until every request has ended; a wrong
    answer may never end one, and then the server is ended."""
    try:
        if server().states(name, "READY", "UNLOADING"):
            server().unload(name, seconds=UNLOAD)
    except ServerError:
        stop()


def parameter(key: str, value: Any) -> str:
    """A line of config.pbtxt."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


# ---- requests


class Stream:
    """A request to the lab's model, sent at once on its own gRPC stream: an error on a shared
    stream does not say which request it belongs to. inputs: arrays, or lists of int32."""

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
        """All responses until the stream ends; the last is a gRPC error if that ended it."""
        self._client.stop_stream()
        self._client.close()
        return self._found


def late(event: grpc.InferResult | InferenceServerException) -> bool:
    """Whether the event says that the stream's time limit has passed."""
    return isinstance(event, InferenceServerException) and "DEADLINE" in str(event.status())
