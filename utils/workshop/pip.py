"""Run pip with a sign of life, a log, and one sentence when it fails.

Standard library only, and nothing that an old Python cannot read: set-up needs it before any
package is installed.
"""

import os
import re
import shutil
import subprocess
import sys
import time

SOURCES = "PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX"

OFFLINE = re.compile(
    "NewConnectionError|NameResolutionError|name resolution|Network is unreachable|ProxyError"
    "|Connection (refused|reset|timed out)|ConnectTimeout|Read timed out"
)


class SetupError(Exception):
    """One sentence that names the problem and its fix."""


def say(text: str) -> None:
    """Print immediately, even into a pipe."""
    print(text, flush=True)


class Pip:
    """Runs `python -m pip install` in `root` and logs it to `log`."""

    def __init__(self, root: str, python: str, log: str):
        self.root, self.python, self.log = root, python, log

    def install(self, title: str, *arguments: str) -> None:
        """Install; raises SetupError."""
        self.run(title, [self.python, "-m", "pip", "install", "--retries", "2", *arguments])

    def run(self, title: str, command: list) -> None:
        """Run `command`, its output in the log and one moving line on the terminal."""
        begin = os.path.getsize(self.log) if os.path.exists(self.log) else 0
        started = time.monotonic()
        # Without variables that make pip install elsewhere.
        environment = {name: text for name, text in os.environ.items() if name not in SOURCES}
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                self.watch(process, title, begin)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode:
            raise SetupError(explain(title, self.read(begin), self.log))
        say(f"   {title}: {time.monotonic() - started:.0f} s")

    def watch(self, process: subprocess.Popen, title: str, begin: int) -> None:
        """Show a sign of life: a moving line on a terminal, otherwise a line every 20 s."""
        started = last = time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            line = f"   {title} … {now - started:.0f} s  "
            if sys.stdout.isatty():
                line += newest_line(self.read(begin))
                print("\r\033[K" + line[: shutil.get_terminal_size().columns - 1], end="")
                sys.stdout.flush()
            elif now - last > 20:
                last = now
                say(line + newest_line(self.read(begin)))
        if sys.stdout.isatty():
            print("\r\033[K", end="")

    def read(self, begin: int) -> str:
        """The log from byte `begin` on."""
        with open(self.log, "rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")


def newest_line(output: str) -> str:
    """Pip's current activity: its last line, shortened."""
    lines = [line.strip() for line in output.splitlines()]
    lines = [line for line in lines if line and not line.startswith("WARNING")]
    return re.sub(r" \(from .*", "", lines[-1])[:80] if lines else ""


def explain(title: str, output: str, log: str) -> str:
    """One sentence for a pip that failed with this output."""
    if re.search("No space left|Disk quota exceeded", output):
        return "The disk is full: free some space and call again; set-up continues from there."
    if OFFLINE.search(output):
        return (
            "The package index cannot be reached: check the network, or name your own index with "
            f"PIP_INDEX_URL=…, and call again; details are in {log}."
        )
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if missing and "+" in missing.group(1):
        other = "the CUDA build (3 GB) with make setup TORCH=cuda"
        if "+cpu" not in missing.group(1):
            other = "the CPU build with make setup TORCH=cpu"
        return f"No {missing.group(1)} found: allow download.pytorch.org, or use {other}."
    if missing:
        return (
            f"The package index has no {missing.group(1)}: name another with PIP_INDEX_URL=…; "
            f"details are in {log}."
        )
    errors = [line for line in output.splitlines() if re.match(r"\s*(error|ERROR)\b", line)]
    reason = (errors or output.splitlines() or ["no message"])[-1].strip()
    return f"{title} failed ({reason}): fix that and call again; details are in {log}."
