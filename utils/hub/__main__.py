"""Seats for a class on this machine: `make hub [HOST=0.0.0.0] [HUB=8001] [DOMAIN=…] [SEATS=…]`;
docs/class/hub.md.

    python -m utils.hub --host 0.0.0.0 --memory 4 --cores 2 --admin ada --config my_config.py

Learners open the address that it prints, choose a name and a password, and get JupyterLab on their
own copy of the course. It needs Linux, bubblewrap, and its own user that is not root. JupyterHub
reads the file of --config after these settings, and the file can change any of them. Ctrl-C stops
the hub and its seats; names, passwords and files stay in --folder.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil
from jupyterhub.app import JupyterHub
from traitlets.config import Config

from utils.classroom.address import address
from utils.cli import check_options, exit_status, option, parse_flags
from utils.hub import proxy
from utils.hub.accounts import Accounts
from utils.hub.limits import Limits, LimitsError
from utils.hub.seat import Seat, SeatError, check_sandbox
from utils.paths import ROOT
from utils.workshop.pip import SetupError

GIB = 1 << 30
# A command with this prefix ends when the hub does, however that ends.
WITH_US = ["setpriv", "--pdeathsig", "TERM"]


@dataclass(frozen=True)
class Options:
    """The command's options; `--help` lists them."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's")
    port: int = option(8001, "port to listen on", least=1024, most=65535)
    domain: str | None = option(None, "a domain; each seat gets a subdomain of it: "
                                "hub.localhost, or https://hub.example.org behind a proxy")
    folder: str = option(str(ROOT / ".kintsugi" / "hub"), "names, passwords and learners' homes",
                         metavar="FOLDER")
    course: str = option(str(ROOT), "the git repository that seats copy", metavar="FOLDER")
    seats: int = option(0, "seats at once; 0: as many as fit in this machine's memory", least=0)
    memory: float = option(4.0, "GiB of memory per seat", above=0)
    cores: float = option(2.0, "cores per seat", above=0)
    processes: int = option(1024, "processes and threads per seat", least=64)
    limits: bool = option(True, "enforce memory, cores and processes")
    idle: float = option(60.0, "minutes after which an unused seat ends; 0: never", least=0)
    class_password: str | None = option(None, "a file with the password that a new name needs",
                                        metavar="FILE")
    admin: str | None = option(None, "name that may see and stop all seats")
    board: str | None = option(None, "folder of make class's --socket, board.sock: labs can join",
                               metavar="FOLDER")
    config: str | None = option(None, "your own file of JupyterHub settings", metavar="FILE")

    def __post_init__(self):
        check_options(self)
        if self.board is not None and not Path(self.board).is_dir():
            raise ValueError(f"--board {self.board} is not a folder: make it, or omit the option")
        if self.config is not None and not Path(self.config).is_file():
            raise ValueError(f"--config {self.config} is not a file: name one, or omit the option")
        if self.class_password is not None and not self.word:
            raise ValueError(
                f"--class-password {self.class_password} is not a readable file with a password: "
                "write one into it, or omit the option"
            )
        # an address such as 192.0.2.7 has no subdomains
        name = r"([a-z0-9-]+\.)+[a-z]+"
        if self.domain and not re.fullmatch(rf"{name}|https?://{name}(:\d+)?", self.domain):
            raise ValueError(
                f"--domain {self.domain} is not a domain: use one like hub.example.org, or "
                "https://hub.example.org if a proxy has the certificate"
            )

    @property
    def word(self) -> str:
        """The class password; "" if a new name needs none."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return Path(self.class_password).read_text().strip() if self.class_password else ""
        return ""

    @property
    def url(self) -> str:
        """The address that learners open."""
        if not self.domain:
            return address(self.host, self.port)
        return self.domain if "://" in self.domain else f"http://{self.domain}:{self.port}"

    @property
    def most_seats(self) -> int:
        """Seats at once: a lesson peaks at 3/4 of a seat's limit (docs/class/fit.md)."""
        room = 0.9 * psutil.virtual_memory().total - 2 * GIB
        return self.seats or max(1, int(room / (0.75 * self.memory * GIB)))


def check_machine(options: Options) -> str:
    """The branch of the course. Raises ValueError, SeatError or LimitsError."""
    if not sys.platform.startswith("linux"):
        raise SeatError("The hub needs Linux: on other machines, a class uses `make lab`.")
    if os.geteuid() == 0:
        raise SeatError(
            "The hub does not run as root: make a user for it (useradd --system kintsugi) and "
            "start it as that user; docs/class/hub.md has a unit for systemd."
        )
    check_sandbox()
    if options.limits:
        Limits()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except OSError as error:
            raise ValueError(
                f"cannot listen on {options.host}:{options.port} ({error.strerror}): is a hub "
                f"running already? make hub HUB={options.port + 1}, or HOST= an address of its own"
            ) from None
    git = ["git", "-c", "safe.directory=*", "-C", options.course]
    words = [*git, "symbolic-ref", "--short", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if found.returncode:
        raise ValueError(
            f"--course {options.course} is not a git repository with a branch "
            f"({found.stderr.strip()}): clone the course there, or git switch -c main"
        )
    return found.stdout.strip()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make the folder, for this user alone. Raises ValueError if another hub uses it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = open(folder / "lock", "w")  # noqa: SIM115
    except OSError as error:
        raise ValueError(
            f"--folder {folder} cannot be written ({error.strerror}): name a folder of the hub's "
            "user"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--folder {folder} is used by another hub: stop that first") from None
        yield


@contextlib.contextmanager
def place_of_sockets(folder: Path) -> Iterator[Path]:
    """A folder for sockets, whose paths must be short; always the same one for a hub's folder.

    Raises ValueError if it belongs to another user.
    """
    name = f"kintsugi-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"
    place = Path(os.environ.get("RUNTIME_DIRECTORY", "/tmp")) / name
    shutil.rmtree(place, ignore_errors=True)  # left by a killed hub
    try:
        place.mkdir(mode=0o700)
    except OSError as error:
        raise ValueError(f"{place} cannot be made ({error.strerror}): remove it") from None
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def settings(options: Options, branch: str, sockets: Path, words: list[str]) -> Config:
    """JupyterHub's settings. words: the command of its proxy."""

    def url(name: str) -> str:
        return f"http+unix://{quote(str(sockets / name), safe='')}"

    folder, c = Path(options.folder).resolve(), Config()
    c.JupyterHub.bind_url = f"http://{options.host}:{options.port}"
    c.JupyterHub.hub_bind_url = url("hub.sock")
    c.ConfigurableHTTPProxy.api_url = url("proxy.sock")
    c.ConfigurableHTTPProxy.command = [*WITH_US, *words]
    c.ConfigurableHTTPProxy.log_level = "error"
    c.ConfigurableHTTPProxy.pid_file = str(sockets / "proxy.pid")
    c.JupyterHub.db_url = f"sqlite:///{folder / 'hub.sqlite'}"
    c.JupyterHub.cookie_secret_file = str(folder / "cookie_secret")
    c.JupyterHub.log_level = "WARN"
    if options.domain:
        c.JupyterHub.subdomain_host = options.url
        c.JupyterHub.cookie_host_prefix_enabled = options.url.startswith("https:")
    c.JupyterHub.active_server_limit = options.most_seats
    c.JupyterHub.template_paths = [str(Path(__file__).with_name("templates"))]
    c.JupyterHub.authenticator_class = Accounts
    c.Accounts.dbm_path = str(folder / "passwords.dbm")
    c.Accounts.class_password = options.word
    c.Authenticator.allow_all = True
    # Valid for files and groups; JupyterHub matches only the beginning.
    c.Authenticator.username_pattern = r"[a-z0-9][a-z0-9-]{0,30}\Z"
    if options.admin:
        c.Authenticator.admin_users = {options.admin}
    c.JupyterHub.spawner_class = Seat
    c.Seat.homes, c.Seat.sockets = str(folder / "homes"), str(sockets)
    c.Seat.hub_socket = str(sockets / "hub.sock")
    c.Seat.course, c.Seat.branch = str(Path(options.course).resolve()), branch
    c.Seat.board = str(Path(options.board).resolve()) if options.board else ""
    c.Seat.limited = options.limits
    c.Seat.mem_limit, c.Seat.cpu_limit = int(options.memory * GIB), options.cores
    c.Seat.process_limit = options.processes
    # A class starts in the same minute, and a new seat copies the course first.
    c.Spawner.start_timeout = c.Spawner.http_timeout = 1200
    # Show the waiting page at once; after 10 s JupyterHub 6.1 would fail on a slow start.
    c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}
    if options.idle:
        # It goes through the proxy, as it does not support Unix sockets.
        hub = f"{address(options.host, options.port)}/hub/api"
        seconds = str(round(60 * options.idle))
        culler = [*WITH_US, sys.executable, "-m", "jupyterhub_idle_culler", "--timeout", seconds]
        culler += ["--url", hub, "--cull-every", str(min(300, round(30 * options.idle) or 1))]
        c.JupyterHub.services = [{"name": "idle-culler", "command": culler}]
        scopes = ["list:users", "read:users:activity", "read:servers", "delete:servers"]
        role = {"name": "idle-culler", "scopes": scopes, "services": ["idle-culler"]}
        c.JupyterHub.load_roles = [role]
    return c


def serve(options: Options) -> None:
    """Run the hub until it is asked to stop."""
    branch, folder = check_machine(options), Path(options.folder).resolve()
    with alone(folder):
        words = proxy.set_up()
        with place_of_sockets(folder) as sockets:
            hub = JupyterHub.instance(config=settings(options, branch, sockets, words))
            held = (
                f"{options.memory:g} GiB, {options.cores:g} cores" if options.limits else "no limit"
            )
            print(f"Learners open\n\n    {options.url}\n")
            print(f"At most {options.most_seats} seats at once; a seat has {held}.")
            if not options.domain:
                print("All seats share one web origin: a page served by one learner can act in the "
                      "seat of another learner who opens it. DOMAIN= prevents that; "
                      "docs/class/hub.md.")
            print(f"Files are in {folder}. Stop with Ctrl-C.", flush=True)
            signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
            file = ["--config", str(Path(options.config).resolve())] if options.config else []
            os.chdir(folder)  # else a stray jupyterhub_config.py would be read
            hub.launch_instance(file)


def main(words: list[str]) -> int:
    def run() -> None:
        serve(Options(**parse_flags(Options, words, prog="python -m utils.hub")))

    errors = (ValueError, SeatError, LimitsError, SetupError)
    return exit_status("utils.hub", run, errors, stopped="stopped")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
