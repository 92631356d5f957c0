"""NVIDIA's load generator, perf_analyzer, on a served model: a second opinion on our own.

    loads = profile(server.grpc, "gpt", [{"text_input": ["def "], "max_tokens": [32]}], (1, 4, 16))
    print(loads if isinstance(loads, str) else table(loads))       # utils.serving.load.table

The package of that name is an empty placeholder; the program itself is inside the manylinux wheel
of tritonclient 2.51.0 (BSD licence), which is fetched once (14 MB) into the environment's share/,
by the first `profile` or by `python -m utils.serving.perf_analyzer`.
Two libraries that it wants come with the server's wheel. Where it cannot be had (no network, a Mac,
ARM) `profile` returns a sentence that says so in place of the loads.

Its own search for a stable window rarely ends on a busy machine, so each run has a number of
requests and a time limit. It counts in whole windows of a second and calls the first response of a
stream "latency"; so the figures here come from the moments of every response, which it exports,
and are worked out as those of our own generator: the two can stand side by side.
"""

import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd

from utils.cli import no_arguments
from utils.serving.load import GLANCE, Load, tokens_of

WHEEL = "tritonclient==2.51.0"
MEMBER = "tritonclient-2.51.0.data/data/bin/perf_analyzer"
SHA256 = "a8e3fa6d2fcd535770f18fa3c9baf21aee85697352637d24c6b2818401c95a34"  # of the program
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
FETCH_SECONDS = 180
HOW = "python -m utils.serving.perf_analyzer"


class Absent(RuntimeError):
    """perf_analyzer cannot be had here; the message says why."""


# ---- where it is


def command(folder: str | Path | None = None, fetch: bool = True) -> tuple[Path, dict]:
    """(the program, its environment): an installed one, the one in `folder`, or fetched into it.

    folder: default `share/perf_analyzer` of the Python environment. Raises Absent.
    """
    installed = shutil.which("perf_analyzer")
    if installed and _starts(Path(installed), dict(os.environ)):
        return Path(installed), dict(os.environ)
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Absent(
            f"perf_analyzer: there is no program for {platform.system()} on {platform.machine()}; "
            "use NVIDIA's container with the Triton SDK"
        )
    folder = Path(folder or Path(sys.prefix) / "share" / "perf_analyzer")
    program = folder / "perf_analyzer"
    if not program.exists():
        if not fetch:
            raise Absent(f"perf_analyzer is not here yet: `{HOW}` fetches it (14 MB, once)")
        _fetch(folder)
    environment = os.environ | {"LD_LIBRARY_PATH": str(_libraries(folder))}
    if not _starts(program, environment):
        raise Absent(
            "perf_analyzer does not start: this system's libraries (OpenSSL 3, "
            "libstdc++) are perhaps too old; use NVIDIA's container with the Triton SDK"
        )
    return program, environment


def _starts(program, environment) -> bool:
    try:
        done = subprocess.run(
            [program, "--version"], env=environment, capture_output=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _fetch(folder):
    """Puts the program into `folder`: checked by its hash, written beside and renamed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-")
    except OSError as problem:
        raise Absent(
            f"perf_analyzer: {folder.name} in the environment's share/ cannot be written: "
            f"{problem.strerror}"
        ) from None
    with work as name:
        ask = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name,
               "--disable-pip-version-check", "--platform", "manylinux1_x86_64",
               "--only-binary", ":all:", WHEEL]
        try:
            done = subprocess.run(ask, capture_output=True, text=True, timeout=FETCH_SECONDS)
        except subprocess.TimeoutExpired:
            raise Absent(
                f"perf_analyzer: pip did not fetch {WHEEL} within {FETCH_SECONDS} s"
            ) from None
        wheels = list(Path(name).glob("*.whl"))
        if done.returncode or not wheels:
            lines = done.stderr.strip().splitlines() or ["no wheel came"]
            raise Absent(f"perf_analyzer: pip could not fetch {WHEEL}: {lines[-1]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            content = wheel.read(MEMBER)
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise Absent(f"perf_analyzer: what is in {WHEEL} is not the program that was tested")
        written = Path(name) / "perf_analyzer"
        written.write_bytes(content)
        written.chmod(0o755)
        written.replace(folder / "perf_analyzer")


def _libraries(folder) -> Path:
    """The folder with the two libraries under the names that the program asks for."""
    spec = find_spec("pytriton")
    source = Path(spec.origin).parent.parent / "nvidia_pytriton.libs" if spec else None
    links = folder / "lib"
    links.mkdir(parents=True, exist_ok=True)
    for name, pattern in LIBRARIES.items():
        found = sorted(source.glob(pattern)) if source and source.is_dir() else []
        if not found:
            raise Absent(
                f"perf_analyzer needs {name}, which comes with nvidia-pytriton: "
                "install that (`make setup` does)"
            )
        fresh = links / f".{name}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(found[0])
        fresh.replace(links / name)
    return links


# ---- what it measures


def profile(
    url: str,
    model: str,
    inputs: list[dict],
    clients: Iterable[int] = (1, 4, 16),
    requests: int | None = None,
    *,
    streaming: bool = True,
    seconds: float = 120,
    output: str = "text_output",
    count: Callable = tokens_of,
    folder: str | Path | None = None,
    fetch: bool = True,
) -> dict[int, Load] | str:
    """{clients: Load}, as `utils.serving.load.sweep` gives; a sentence where it cannot be had.

    url        "host:port" of gRPC; streaming=False: of HTTP, for models that are not decoupled
    inputs     requests to send in turn, each {name of a tensor: [values]}
    requests   of each load; default: 4 a client
    output     the tensor whose values are a piece of the answer; `count` gives its tokens
    seconds    limit of each load
    Raises RuntimeError with its last words where it fails or does not end in time.
    """
    try:
        program, environment = command(folder, fetch)
    except Absent as reason:
        return str(reason)
    loads = {}
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as work:
        data, export = Path(work) / "inputs.json", Path(work) / "profile.json"
        data.write_text(json.dumps({"data": list(inputs)}))
        for many in clients:
            call = [program, "-m", model, "-u", url, "-i", "grpc" if streaming else "http",
                    *(["--streaming"] if streaming else []), "--input-data", data,
                    "--concurrency-range", str(many), "--max-threads", str(many),
                    "--request-count", str(requests or 4 * many),
                    "--profile-export-file", export]
            _run([str(word) for word in call], environment, seconds)
            loads[many] = loads_of(json.loads(export.read_text()), output, count)[many]
            export.unlink()
    return loads


def _run(call, environment, seconds):
    """Runs the program in a session of its own, so that all of it ends at the limit."""
    process = subprocess.Popen(
        call, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )
    try:
        words, _ = process.communicate(timeout=seconds)
    except BaseException as problem:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(problem, subprocess.TimeoutExpired):
            raise RuntimeError(
                f"perf_analyzer did not end within {seconds} s: send fewer requests"
            ) from None
        raise
    if process.returncode:
        lines = [line.strip() for line in words.splitlines() if line.strip()]
        raise RuntimeError(f"perf_analyzer failed: {' '.join(lines[-3:])}")


def loads_of(
    report: dict, output: str = "text_output", count: Callable = tokens_of
) -> dict[int, Load]:
    """{clients: Load} of its profile export (a dictionary of moments in ns)."""
    loads = {}
    for experiment in report["experiments"]:
        requests = sorted(experiment["requests"], key=lambda request: request["timestamp"])
        if not requests:
            continue
        zero, rows = requests[0]["timestamp"], []
        for request in requests:
            moments = [(moment - zero) / 1e9 for moment in request["response_timestamps"]]
            pieces = [outputs.get(output, "") for outputs in request["response_outputs"]]
            pieces = [piece for piece in pieces if not (isinstance(piece, str) and piece == "")]
            start = (request["timestamp"] - zero) / 1e9
            rows.append({
                "start": start, "sent": start, "pieces": len(pieces),
                "first": moments[0] if moments else np.nan,
                "end": moments[-1] if moments else np.nan,
                "tokens": float(sum(count(piece) for piece in pieces)),
                "error": None if moments else "no response",
            })
        frame = pd.DataFrame(rows)
        frame.index.name = "request"
        seconds = float(frame["end"].max())
        many = int(experiment["experiment"]["value"])
        loads[many] = Load(frame, _flying(frame, seconds), seconds, many)
    return loads


def _flying(rows, seconds) -> pd.DataFrame:
    """How many requests were under way, looked at as often as our own generator looks."""
    looks = np.arange(0, max(seconds, GLANCE), GLANCE)[:, None]
    ends = rows["end"].fillna(np.inf).to_numpy()[None]
    flying = (rows["start"].to_numpy()[None] <= looks) & (looks < ends)
    return pd.DataFrame({"seconds": looks[:, 0], "count": flying.sum(axis=1)})


if __name__ == "__main__":
    no_arguments("utils.serving.perf_analyzer", __doc__)
    try:
        print(subprocess.check_output([command()[0], "--version"], env=command()[1], text=True))
    except Absent as reason:
        sys.exit(str(reason))
