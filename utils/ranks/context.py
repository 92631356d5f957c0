"""The surroundings of a training run: its ranks, the signals that end it, its metric lines."""

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from utils.private_api import set_default_timeout
from utils.ranks.heartbeat import Heartbeat, started_together


@contextmanager
def world(
    device: str = "auto", group: bool = False, limit: float = 600.0
) -> Iterator[tuple[int, int, torch.device]]:
    """Yield (rank, world size, device) of the open process group; else of the one described by
    torchrun's environment; else 0, 1 and a device (with `group`: in a process group of one).

    "auto" uses GPUs if every rank of this machine has one to itself, else the CPU. A rank started
    by torchrun waits at most `limit` seconds for another; then RanksLost says for which.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not os.environ.get(name, "0").isdecimal():
            raise ValueError(f"{name}={os.environ[name]} is not a number: unset it or use torchrun")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu or auto")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    enough = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus
    started = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if started:
        seconds = timedelta(seconds=limit)
        set_default_timeout(seconds)  # for groups that are made later
        with started_together(limit):
            backend = "nccl" if enough and device != "cpu" else "gloo"
            dist.init_process_group(backend, timeout=seconds)
    elif dist.is_initialized():
        enough, local_rank = "nccl" in dist.get_backend(), dist.get_rank() % max(gpus, 1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if size == 1 and gpus:
        enough, local_rank = True, torch.cuda.current_device()
    on_gpu = device == "cuda" or (device == "auto" and enough)
    if group and not dist.is_initialized():
        backend, started = "nccl" if on_gpu else "gloo", True
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    where = torch.device("cuda", local_rank % gpus) if on_gpu else torch.device("cpu")
    try:
        alone = not started or size == 1  # without other ranks and torchrun's store
        watched = nullcontext() if alone else Heartbeat(rank, size, limit).watched()
        with watched, torch.cuda.device(where) if on_gpu else nullcontext():
            yield rank, size, where
    finally:
        if started:
            dist.destroy_process_group()


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Yield an Event that Ctrl-C (SIGINT) or SIGTERM sets; a second Ctrl-C stops at once.

    Under torchrun a second one changes nothing: torchrun passes every Ctrl-C on to its ranks.
    """
    asked, before = threading.Event(), {}

    def ask(number, frame):
        asked.set()
        if not dist.is_torchelastic_launched():
            signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep the memory that a step frees for the next step, on Linux with glibc.

    Every step allocates and frees the same megabytes of activations. By default glibc returns much
    of that to Linux, which then hands it out again as new pages that it must clear first. On other
    systems this does nothing. See mallopt(3).
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt, malloc_trim = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError, TypeError):
        yield
        return
    trim_threshold, mmap_threshold, mib = -1, -3, 2**20  # the parameters' numbers in malloc.h
    mallopt(mmap_threshold, 32 * mib)  # the most that glibc accepts
    mallopt(trim_threshold, 2047 * mib)
    try:
        yield
    finally:
        mallopt(trim_threshold, 64 * mib)  # the highest value glibc's own adjustment reaches
        malloc_trim(0)


class MetricsLost(ValueError):
    """A line of metrics that cannot be written."""


@contextmanager
def metric_lines(
    target: str | None, last_row: dict | None, last_step: int, again: bool = False
) -> Iterator[Callable[[dict], None]]:
    """Yield write(dictionary): a JSON line to standard output ("-"), a file, or nowhere (None).

    A resumed run continues its file; lines after `last_step`, whose steps now run again, are cut
    first. `last_row` is the line of that step, and is written if the run died before writing it. A
    file with other content, or of another run, is left unchanged: ValueError.

    again   whether a new run (last_step 0) may have been killed before it could save anything
    """
    if target is None:
        yield lambda row: None
        return
    if target == "-":
        yield _print_line
        return
    path = Path(target).expanduser()
    if path.exists() and not path.is_file():
        raise ValueError(f"--metrics {target} is not a regular file: name one, or - to print")
    try:
        file = path.open("ab", buffering=0)
        lines = path.read_bytes()
        length, kept = _kept(lines, last_step)
        if not last_step:
            own = again or not lines
        else:  # the line before any cut lines must be the checkpoint's
            own = b"\n" not in lines[length:] or not last_row or last_row.items() <= kept.items()
        if own:
            file.truncate(length)
    except OSError as error:
        raise ValueError(f"--metrics {target} cannot be written: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"--metrics {target} does not hold metric lines: name another") from None
    if not own:
        raise ValueError(f"--metrics {target} holds another run's lines: name another file")

    def write(row):
        line = json.dumps(row).encode() + b"\n"
        try:
            while line:  # a nearly full disk takes only part of it
                line = line[file.write(line) :]
        except OSError as error:
            reason = error.strerror
            raise MetricsLost(f"--metrics {target} cannot be written: {reason}") from None

    with file:
        if last_row and kept.get("step", 0) == last_step - 1:
            write(last_row)
        yield write


def _print_line(row):
    try:
        print(json.dumps(row), flush=True)
    except OSError as error:
        # Python also flushes it on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise MetricsLost(f"--metrics - cannot be written: {error.strerror}") from None


def _kept(lines: bytes, last_step: int) -> tuple[int, dict]:
    """(length, last row) of the metric lines up to a step. Raises LookupError, TypeError or the
    like for other content. Only the last line may be incomplete, if its run died."""
    length, kept, first_key = 0, {}, b'{"step": '
    for line in lines.splitlines(keepends=True):
        if line.endswith(b"\n"):
            row = json.loads(line)
            if not {"loss", "tokens", "seconds"} <= row.keys():
                raise LookupError
            if row["step"] <= last_step:
                length, kept = length + len(line), row
        elif not (line.startswith(first_key) or first_key.startswith(line)):
            raise LookupError
    return length, kept
