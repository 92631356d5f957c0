"""Open JupyterLab on a page that says where you are: `make lab [PORT=8888] [CLASS=http://…/join/…]`.

The server listens on this machine only, asks for a token, and uses the workshop's settings
(lab_settings/: no news, run times of cells, Markdown shown as pages, a closed notebook stops its
kernel). Ctrl-C stops it with everything it started. With CLASS it also reports to the board of a
class, after the learner has agreed (`utils/classroom/join.py`); in a seat of a hub it only does
that.
"""

import argparse
import contextlib
import fcntl
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path
from typing import NoReturn

from utils.classroom.join import JoinError, Membership, join, read_address
from utils.course import ledger, progress
from utils.paths import ROOT
from utils.ranks.supervise import Child, end, supervised

LOG = ROOT / ".kintsugi" / "lab.log"  # the output of the server and its kernels
SETTINGS = Path(__file__).with_name("lab_settings")
HOST = "127.0.0.1"
GRACE = 15.0  # seconds that the server and its kernels may take to end
LAST_REPORTS = 3.0  # and the last reports; unsent ones stay on the disk


class LabError(Exception):
    """One sentence that names the problem and its fix."""


def check_port(port: int) -> None:
    """Raise LabError unless JupyterLab can listen on `port`."""
    if not 1 <= port <= 65535:
        raise LabError(f"PORT={port} is not a port: choose one from 1024 to 65535.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError:
            raise LabError(f"Port {port} is reserved: choose one above 1023.") from None
        except OSError:
            raise LabError(
                f"Port {port} is taken (is a lab running already?): make lab PORT={port + 1}"
            ) from None


def environment(token: str, base: dict) -> dict:
    """`base` with the server's token (in `ps`, anyone could read it) and the lab's settings."""
    paths = [str(SETTINGS), base.get("JUPYTER_CONFIG_PATH", "")]
    return {
        **base,
        "JUPYTER_TOKEN": token,
        "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", "")]),
    }


def command(port: int, root: Path = ROOT, *more: str) -> list[str]:
    """The command line of the server on folder `root`; `more` are options of JupyterLab."""
    options = {
        "--ServerApp.ip": HOST,
        "--ServerApp.port": port,
        "--ServerApp.port_retries": 0,
        "--ServerApp.root_dir": root,
        "--LabApp.default_url": "/lab/tree/README.md",
        "--Application.log_level": "ERROR",
    }
    named = [f"{name}={value}" for name, value in options.items()]
    allowed = ["--allow-root"] if os.geteuid() == 0 else []
    return [sys.executable, "-m", "jupyterlab", "--no-browser", *allowed, *named, *more]


def start(command: list[str], environment: dict, log: Path = LOG) -> Child:
    """Start the server under a supervisor: Ctrl-C reaches us, and we stop it cleanly."""
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as out:
        return Child(supervised(command, grace=GRACE), output=out, env=environment)


def wait_until_ready(server: Child, port: int, token: str, seconds: float = 60) -> None:
    """Return when the server accepts our token; raise LabError if it ends or takes too long."""
    request = urllib.request.Request(
        f"http://{HOST}:{port}/api/status", headers={"Authorization": f"token {token}"}
    )
    no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.returncode is not None:
            raise LabError(f"JupyterLab ended by itself; {LOG} says why.")
        with contextlib.suppress(OSError, urllib.error.URLError):
            no_proxy.open(request, timeout=2).close()
            return
        time.sleep(0.1)
    raise LabError(f"JupyterLab did not answer within {seconds:.0f} s: is the machine overloaded?")


def stop(server: Child) -> None:
    """Ask the server to stop its kernels and itself; after GRACE, kill the remaining processes."""
    end([server], 2 * GRACE)


def start_reporter(member: Membership) -> list[Child]:
    """Start the process that reports to the class; it ends with us, however we end.

    Empty if the disk is full or the system refuses another process: the lab continues.
    """
    words = [sys.executable, "-m", "utils.classroom.reporter", read_address(member.address).key]
    try:
        with (ledger.home() / "reporter.log").open("w") as log:
            return [Child(words, output=log, env={**os.environ, "PYTHONPATH": str(ROOT)})]
    except OSError as error:
        print(f"Nothing is reported to the class ({error.strerror}); the lab works without it.")
        return []


def has_display() -> bool:
    """Whether a browser can open here."""
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def first_page() -> str:
    """The page on which the lab opens: "You are here", written now; else the README."""
    try:
        progress.write_page()
    except OSError:  # the folder may be read-only
        return "README.md"
    return progress.HERE.name


def show(url: str) -> Path:
    """Open the browser at a page that redirects to `url`, and return the page. Only this user can
    read it: the token must not be in a command line, which anyone can read."""
    descriptor, page = tempfile.mkstemp(".html", "lab-", LOG.parent)
    with open(descriptor, "w") as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={url}">\n')
    webbrowser.open(Path(page).as_uri())
    return Path(page)


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def serve(port: int, browser: bool, member: Membership | None = None) -> None:
    """Run the server until Ctrl-C, with the reporter of this member of a class."""
    token = secrets.token_hex(16)
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    known = {} if member is None else {ledger.CLASS: member.alias}
    server = start(command(port), environment(token, {**os.environ, **known}))
    reporter: list[Child] = []
    page = None
    try:
        if member is not None:
            reporter = start_reporter(member)
        wait_until_ready(server, port, token)
        url = f"http://{HOST}:{port}/lab/tree/{first_page()}?token={token}"
        print(f"JupyterLab runs at\n\n    {url}\n\nStop it with Ctrl-C.", flush=True)
        if "SSH_CONNECTION" in os.environ:
            tunnel = f"ssh -L {port}:{HOST}:{port} {socket.gethostname()}"
            print(f"From another machine, first run there: {tunnel}", flush=True)
        if browser and has_display():
            page = show(url)
        server.wait()
        raise LabError(f"JupyterLab ended by itself; {LOG} says why.")
    except KeyboardInterrupt:
        print("\nStopping JupyterLab and its kernels …", flush=True)
    finally:
        stop(server)
        end(reporter, LAST_REPORTS)
        if page:
            page.unlink(missing_ok=True)


def report(member: Membership) -> None:
    """Report for this member of a class until Ctrl-C, or until the terminal is closed."""
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    with (ledger.home() / "alias").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # `ledger.alias` looks for it
        file.write(member.alias)
        file.flush()
        reporter = start_reporter(member)
        try:
            print("Leave this terminal open; Ctrl-C ends the reports.", flush=True)
            for child in reporter:
                child.wait()
        except KeyboardInterrupt:
            print()
        finally:
            end(reporter, LAST_REPORTS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Open JupyterLab where you left off.")
    parser.add_argument("--port", type=int, default=8888)
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--class", dest="address", metavar="ADDRESS", help="report to this class")
    options = parser.parse_args()
    try:
        in_a_seat = "JUPYTERHUB_SERVICE_PREFIX" in os.environ  # where JupyterLab is already running
        if not in_a_seat:
            check_port(options.port)
        elif not options.address:
            raise LabError("This is a seat of a hub: JupyterLab is already open in your browser.")
        member = join(options.address) if options.address else None
        if not in_a_seat:
            serve(options.port, not options.no_browser, member)
        elif member is not None:
            report(member)
    except KeyboardInterrupt:  # while it was asking
        sys.exit(130)
    except (LabError, JoinError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
