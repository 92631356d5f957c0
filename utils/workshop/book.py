"""Make the book or the slides from the stored notebooks: `make book`, `make slides`.

Runs with the system's Python and its standard library only. The packages that it needs are in their
own environment, .venv/book (0.3 GB, made once in half a minute), so that readers need neither torch
nor JupyterLab. Nothing is executed, and only that set-up uses the network.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from utils.workshop import setup  # noqa: E402
from utils.workshop.pip import Pip, SetupError, say  # noqa: E402

SOURCE = os.path.join(ROOT, "docs", "book")
LOCK = os.path.join(SOURCE, "requirements.txt")
HOME = os.path.join(ROOT, ".venv", "book")
PYTHON = os.path.join(HOME, "bin", "python")
STAMP = os.path.join(HOME, "kintsugi.json")  # what it was made from; written at the end
DISK_GB = 0.5


def fingerprint() -> str:
    """The environment's inputs: it must be made again for a changed list or a moved folder."""
    with open(LOCK, "rb") as file:
        return hashlib.sha256(ROOT.encode() + file.read()).hexdigest()


def ready() -> bool:
    """Whether the environment was made from this list, and its Python runs."""
    try:
        with open(STAMP) as file:
            made = json.load(file)
        subprocess.run([PYTHON, "-I", "-c", ""], check=True, timeout=60)
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
    return made == fingerprint()


def set_up() -> None:
    """Make the environment if it is missing; raises SetupError. A second call waits."""
    if ready():
        return
    setup.check_machine(sys.version_info[:2], "Linux", "x86_64")  # no torch: any machine will do
    setup.check_venv_module()
    setup.check_disk(ROOT, DISK_GB)
    os.makedirs(os.path.dirname(HOME), exist_ok=True)
    with open(HOME + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready():
            return
        say("Setting up the book's own environment, .venv/book (once, half a minute).")
        shutil.rmtree(HOME, ignore_errors=True)
        pip = Pip(ROOT, PYTHON, log=HOME + ".log")
        # Not sys.executable: that may be .venv, which has its own packages.
        pip.run("virtual environment", [sys._base_executable, "-m", "venv", HOME])
        pip.install("packages", "-r", LOCK)
        with open(STAMP, "w") as file:
            json.dump(fingerprint(), file)


def command(kind: str, out: str, scratch: str) -> list:
    """The command that makes the "book" or the "slides" in the folder `out`."""
    if kind == "slides":
        return [PYTHON, os.path.join(SOURCE, "slides.py"), out]
    return [PYTHON, "-m", "sphinx", "-q", "-E", "-d", scratch, "-c", SOURCE, ROOT, out]


def build(kind: str, out: str) -> str:
    """Make the "book" or the "slides" in the folder `out`, replacing its content.

    Returns the warnings, "" if there are none. Raises SetupError; the old folder then stays.
    """
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(out))) as folder:
        new = os.path.join(folder, "new")
        environment = {**os.environ, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command(kind, new, os.path.join(folder, "scratch")),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        words = done.stdout.decode(errors="replace").strip()
        if done.returncode:
            raise SetupError(f"The {kind} could not be made: {words}")
        if os.path.exists(out):
            os.rename(out, os.path.join(folder, "old"))
        os.rename(new, out)
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the book or the slides.")
    parser.add_argument("kind", choices=["book", "slides"])
    parser.add_argument("--out", help="the folder (default: build/book or build/slides)")
    options = parser.parse_args()
    out = options.out or os.path.join(ROOT, "build", options.kind)
    signal.signal(signal.SIGTERM, setup.interrupt)
    try:
        set_up()
        warnings = build(options.kind, out)
    except SetupError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{error}: fix that and call again.")
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the next call starts over.")
    if warnings:
        say(warnings)
    say(f"Open this page in a browser: {os.path.relpath(os.path.join(out, 'index.html'))}")


if __name__ == "__main__":
    main()
