"""Runs the parts and stores their results; see `tests/gpu/__init__.py`."""

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

import torch

from utils.paths import ROOT
from utils.ranks.supervise import OVER, Child, ChildEnded, end, supervised

REFERENCE = ROOT / "docs" / "reference"
MINUTES = 60  # for all parts together
LIMIT = 240  # seconds per part
LOOK = 0.2  # seconds between checks for Ctrl-C
TORCH = (2, 11)


@dataclass(frozen=True)
class Part:
    """A function to run ("module:function"), its least number of GPUs, and its time limit."""

    function: str
    about: str
    gpus: int = 1
    seconds: float = LIMIT


PARTS = {
    "machine": Part("tests.gpu.machine:machine", "name, driver, copy, matrix products"),
    "tests": Part("tests.gpu.course:tests", "the tests that skip without a GPU"),
    "trainer": Part("tests.gpu.training:trainer", "utils.train in every way: its losses"),
    "offload": Part("tests.gpu.training:offload", "offloading, and DeepSpeed: their losses"),
    "compile": Part("tests.gpu.training:compiled", "torch.compile: its losses"),
    "one-card": Part("tests.gpu.one_card:one_card", "two ranks on one card equal one rank"),
    "nccl": Part("tests.gpu.training:nccl", "dp, shard, tp, pp and cp on two GPUs", 2),
    "context": Part("tests.gpu.training:context", "attention of 8k to 128k positions", 2),
    "adamw": Part("tests.gpu.kernels:adamw", "AdamW beside a copy, at up to 1 B parameters"),
    "rms_norm": Part("tests.gpu.kernels:rms_norm", "RMSNorm beside a copy"),
    "shape": Part("tests.gpu.shape:shape", "models of equal parameters, by their shape"),
    "serving": Part("tests.gpu.serving:engine", "the engine: the CPU's tokens, tokens/s"),
    "decode-1b": Part("tests.gpu.decode:ours_1b", "the engine: 1.3 B parameters, bf16, int8"),
    "decode-1b-transformers": Part("tests.gpu.decode:transformers_1b", "its peer, two ways"),
    "decode-1b-gpt-fast": Part("tests.gpu.decode:gpt_fast_1b", "its peer, GPTFAST=clone"),
    "decode-8b": Part("tests.gpu.decode:ours_8b", "the engine: 8 B parameters, bf16, int8"),
    "decode-8b-transformers": Part("tests.gpu.decode:transformers_8b", "its peer, two ways"),
    "decode-8b-gpt-fast": Part("tests.gpu.decode:gpt_fast_8b", "its peer, GPTFAST=clone"),
    "memory": Part("tests.gpu.training:planned_memory", "the planner beside a real step"),
    "mfu": Part("tests.gpu.training:mfu", "1.3 B parameters by technique: MFU"),
    "sharded": Part("tests.gpu.training:sharded", "the same, sharded or offloaded: MFU"),
    "nanogpt": Part("tests.gpu.peers:steps", "the step beside transformers', NANOGPT=clone"),
    "snapshot": Part("tests.gpu.profiles:snapshot", "what the allocator holds at a step's peak"),
    "counters": Part("tests.gpu.profiles:counters", "NVML beside a trace; ncu inside kernels"),
    "lessons": Part("tests.gpu.course:lessons", "lessons 00 to 03: their seconds"),
    "lessons-04": Part("tests.gpu.course:later_lessons", "lessons 04, 05 and 12: their seconds"),
}


def why_not(part: Part, rehearse: bool, left: float) -> str:
    """A sentence that says why a part cannot run here, or ''."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < TORCH:
        return f"torch {torch.__version__} is older than {TORCH[0]}.{TORCH[1]}"
    if not rehearse and not gpus:
        return "there is no CUDA device"
    if not rehearse and gpus < part.gpus:
        return f"it needs {part.gpus} GPUs, and one is here"
    return "" if left > 0 else f"the {MINUTES} minutes are over"


def run_part(part: Part, seconds: float, rehearse: bool, done: dict) -> None:
    """Run a part in its own process; fills `done`, even when interrupted."""
    done |= {"state": "failed", "why": "it was interrupted", "rows": {}}
    done |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()}
    done["threads"] = torch.get_num_threads()  # for what runs on the CPU
    command = [sys.executable, "-m", "tests.gpu.child", part.function]
    places = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONUNBUFFERED": "1"}
    if rehearse:  # on the CPU even if there is a GPU; Triton kernels are interpreted
        command += ["--rehearse"]
        env |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # otherwise it starts a pool of processes
    began = time.monotonic()
    # a cache of its own: a killed process may have left half a file in the common one
    cache = env["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="gpu-")
    child = Child(supervised(command, folder=cache), env=env)
    interrupts = []  # handled between rows: raised while a row is read, Ctrl-C would lose the row
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
    """Add a child's line to `done`, a row or an error; returns whether more can follow."""
    said = json.loads(line)
    if isinstance(said, dict):
        ((done["state"], done["why"]),) = said.items()
        return False
    name, row = said
    done["rows"][name] = row
    print(f"    {name:32} {shown(row)}", flush=True)
    return True


def shown(row: dict) -> str:
    """A row's figures in one line."""
    values = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
    return "  ".join(f"{name} {value}" for name, value in zip(row, values))


def run(parts: dict[str, Part], rehearse: bool, out: Path | None) -> dict:
    """Run the parts in turn; returns their results by name. The record is stored after each part,
    and keeps an earlier run's rows of a part until this run finds some.

    out   the file; None: docs/reference/<gpu>.json, if there is a GPU
    """
    until = time.monotonic() + 60 * MINUTES - 2 * OVER
    out = out or reference()
    record, found = {"gpu": card(rehearse), "rehearsal": rehearse, "parts": {}}, {}
    if out is not None and out.is_file():
        record["parts"] = json.loads(out.read_text(encoding="utf-8"))["parts"]
    for name, part in parts.items():
        done = found[name] = {"state": "skipped", "rows": {}}
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
            if done["rows"] or not record["parts"].get(name, done)["rows"]:
                record["parts"][name] = done
            if out is not None:
                store(record, out)
    return found


def card(rehearse: bool) -> str:
    """The name of the measured device."""
    gpu = not rehearse and torch.cuda.is_available()
    return torch.cuda.get_device_name(0) if gpu else "CPU"


def reference() -> Path | None:
    """The file with this GPU's figures; None without a GPU."""
    name = re.sub(r"\W+", "_", card(False).lower())
    return REFERENCE / f"{name}.json" if torch.cuda.is_available() else None


def commit() -> str:
    """The commit that is measured, and whether files differ from it."""

    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    with contextlib.suppress(OSError):  # git is not installed
        if head := git("rev-parse", "HEAD"):  # otherwise not a clone
            changed = git("status", "--porcelain", "-uno", "--", ".", f":!{REFERENCE}")
            return head + (changed and ", changed")
    return "unknown"


def store(record: dict, out: Path) -> None:
    """Write a temporary file, sync it and rename it."""
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
            print(f"{name:22} {part.seconds:4.0f} s  {part.about}")
        return 0
    if chosen.rehearse and not chosen.out:
        parser.error("--rehearse measures no GPU: name a file with --out")
    if chosen.out and not chosen.out.parent.is_dir():
        parser.error(f"--out {chosen.out}: there is no folder {chosen.out.parent}")
    parts = {name: PARTS[name] for name in PARTS if name in (chosen.only or PARTS)}
    try:
        found = run(parts, chosen.rehearse, chosen.out)
    except KeyboardInterrupt:
        print("Interrupted; what the parts before had found is stored.")
        return 130
    return int(any(done["state"] == "failed" for done in found.values()))


if __name__ == "__main__":
    sys.exit(main())
