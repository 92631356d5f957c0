"""Runs the parts and stores what they found; see `tests/gpu/__init__.py`."""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from utils.paths import ROOT
from utils.ranks.supervise import OVER, Child, ChildEnded, end, supervised

REFERENCE = ROOT / "docs" / "reference"
MINUTES = 25  # of all parts together
LOOK = 0.2  # seconds between two looks whether Ctrl-C was pressed
TORCH = (2, 11)


@dataclass(frozen=True)
class Part:
    """What runs (module:function), for how many seconds at most, on how many GPUs at least."""

    function: str
    seconds: float
    about: str
    gpus: int = 1


PARTS = {
    "machine": Part("tests.gpu.machine:machine", 90, "name, driver, copy, matrix products"),
    "tests": Part("tests.gpu.course:tests", 240, "the tests that skip without a GPU"),
    "trainer": Part("tests.gpu.training:trainer", 300, "utils.train in every way: its losses"),
    "nccl": Part("tests.gpu.training:nccl", 180, "dp, shard, tp, pp and cp on two GPUs", 2),
    "context": Part("tests.gpu.training:context", 180, "attention of 8k to 128k positions", 2),
    "adamw": Part("tests.gpu.kernels:adamw", 150, "AdamW beside a copy, at up to 1 B parameters"),
    "rms_norm": Part("tests.gpu.kernels:rms_norm", 60, "RMSNorm beside a copy"),
    "serving": Part("tests.gpu.serving:engine", 150, "the engine: the CPU's tokens, tokens/s"),
    "memory": Part("tests.gpu.training:planned_memory", 120, "the planner beside a real step"),
    "mfu": Part("tests.gpu.training:mfu", 420, "1.3 B parameters by technique: MFU"),
    "lessons": Part("tests.gpu.course:lessons", 420, "lessons 00 to 05 and 12: their seconds"),
}


def why_not(part: Part, rehearse: bool, left: float) -> str:
    """The sentence that says why a part cannot run here, or ''."""
    try:
        import torch
    except ImportError as error:
        return f"torch is not installed: {error}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < TORCH:
        return f"torch {torch.__version__} is older than {TORCH[0]}.{TORCH[1]}"
    if not rehearse and not gpus:
        return "there is no CUDA device"
    if not rehearse and gpus < part.gpus:
        return f"it needs {part.gpus} GPUs, and one is here"
    return "" if left > 0 else f"the {MINUTES} minutes are over"


def run_part(part: Part, seconds: float, rehearse: bool, done: dict) -> None:
    """Runs a part in a process of its own; fills `done`, also where it is interrupted."""
    done |= {"state": "failed", "why": "it was interrupted", "rows": {}}
    command = [sys.executable, "-m", "tests.gpu.child", part.function]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    if rehearse:  # even where a GPU is; kernels in the Triton language are interpreted
        command += ["--rehearse"]
        env |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else it starts a pool of them
    began = time.monotonic()
    # compiled code of its own: who was killed may have left half a file where all look
    cache = env["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="gpu-")
    child = Child(supervised(command, folder=cache), env=env)
    interrupts = []  # Ctrl-C comes between two rows: raised while one is read, it would lose it
    usual = signal.signal(signal.SIGINT, lambda *_: interrupts.append(time.monotonic()))
    try:
        more = True
        while more:
            left = max(0.0, began + seconds - time.monotonic())
            try:
                more = keep(child.answer(0 if interrupts else min(left, LOOK)), done)
            except TimeoutError:
                if interrupts:
                    break
                if left <= LOOK:
                    raise
    except TimeoutError:
        done["why"] = f"it was not done after {seconds:.0f} s; the rows before are kept"
    except ChildEnded:
        child.wait(OVER)
        failed = {name: row["failed"] for name, row in done["rows"].items() if "failed" in row}
        if child.returncode:
            done["why"] = f"its process ended with status {child.returncode}: {child.last_words()}"
        elif failed:
            name, first = next(iter(failed.items()))
            done["why"] = f"{len(failed)} of {len(done['rows'])} rows: {name}: {first}"
        else:
            done |= {"state": "done", "why": ""}
    finally:
        end([child], OVER)
        shutil.rmtree(cache, ignore_errors=True)
        done["seconds"] = round(time.monotonic() - began, 1)
        signal.signal(signal.SIGINT, usual)
    if interrupts:
        raise KeyboardInterrupt


def keep(line: bytes, done: dict) -> bool:
    """Adds a child's line to `done`: a row, or why it has failed; whether more can come."""
    said = json.loads(line)
    if isinstance(said, dict):
        done["why"] = said["failed"]
        return False
    name, row = said
    done["rows"][name] = row
    print(f"    {name:32} {shown(row)}", flush=True)
    return True


def shown(row: dict) -> str:
    """A row's figures in a line."""
    values = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
    return "  ".join(f"{name} {value}" for name, value in zip(row, values))


def run(parts: dict[str, Part], rehearse: bool, out: Path | None) -> dict:
    """All parts, one after the other; what is found is stored after each.

    out   the file; None: docs/reference/<gpu>.json, once a part has run
    """
    until = time.monotonic() + 60 * MINUTES - 2 * OVER
    record = {"rehearsal": rehearse, **facts(), "parts": {}}
    for name, part in parts.items():
        done = record["parts"][name] = {"state": "skipped"}
        left = until - time.monotonic()
        if why := why_not(part, rehearse, left):
            done["why"] = why
        else:
            print(f"{name}: {part.about}", flush=True)
        try:
            if not why:
                run_part(part, min(part.seconds, left), rehearse, done)
        finally:
            print(f"{name:12} {done['state']:8} {done['why']}", flush=True)
            store(record, out)
    return record


def facts() -> dict:
    """When, and of which commit; with which torch and driver is the part `machine`."""

    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    commit = "unknown"
    with contextlib.suppress(OSError):  # git is not installed
        commit = git("rev-parse", "HEAD") + (git("status", "--porcelain", "-uno") and ", changed")
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit}


def store(record: dict, out: Path | None) -> None:
    """Writes beside, syncs and renames; without `out`, only what a GPU has measured."""
    device = record["parts"].get("machine", {}).get("rows", {}).get("device")
    if out is None and (record["rehearsal"] or not device):
        return
    if out is None:
        out = REFERENCE / (re.sub(r"\W+", "_", device["gpu"].lower()) + ".json")
    beside = out.with_name(out.name + ".partial")
    with beside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(out)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="NAME", help="these parts")
    parser.add_argument("--list", action="store_true", help="the parts, and their seconds at most")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes on the CPU; needs --out"
    )
    parser.add_argument("--out", type=Path, help="default: docs/reference/<gpu>.json")
    chosen = parser.parse_args(words)
    if chosen.list:
        for name, part in PARTS.items():
            print(f"{name:10} {part.seconds:4.0f} s  {part.about}")
        return 0
    if (chosen.only or chosen.rehearse) and not chosen.out:
        parser.error("--only and --rehearse are no whole run: name a file with --out")
    if chosen.out and not chosen.out.parent.is_dir():
        parser.error(f"--out {chosen.out}: there is no folder {chosen.out.parent}")
    parts = {name: PARTS[name] for name in PARTS if name in (chosen.only or PARTS)}
    try:
        record = run(parts, chosen.rehearse, chosen.out)
    except KeyboardInterrupt:
        print("Interrupted; what the parts before had found is stored.")
        return 130
    return int(any(done["state"] == "failed" for done in record["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
