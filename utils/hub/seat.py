"""A learner's seat: JupyterLab in its own namespaces, on the learner's own copy of the course.

JupyterHub's local spawner, with three additions:

- *bubblewrap*: the seat has its own network, in which it is alone, its own processes and its own
  /tmp. Of the machine's files it sees the system and the course, both read-only, and its own home.
  So all learners can use the same ports, and none sees another's files, ports or processes.
- *a control group* (`utils/hub/limits.py`): memory, cores and processes.
- *git*: each time the seat starts, the learner's copy of the course, ~/kintsugi, gets the course's
  changes. The learner's own changes stay (docs/class/pull.sh).

A seat has only its own network, so JupyterLab and the hub listen on Unix sockets, which are files
that only the seats meant to use them can see. Seats end with their hub.
"""

import asyncio
import contextlib
import glob
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import quote

import psutil
from jupyterhub.objects import Server
from jupyterhub.spawner import LocalProcessSpawner
from traitlets import Bool, Integer, List, Unicode

from utils.classroom.join import WAY
from utils.hub.limits import Group, Limits
from utils.paths import ROOT
from utils.workshop.lab import SETTINGS

HOME = Path("/home/learner")  # a learner's home, as the seat sees it
COPY = HOME / "kintsugi"
SOCKET = Path("/run/seat/lab.sock")
# Folders of the system that a seat sees, if they exist.
SYSTEM = [Path(name) for name in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/sys")]
# Seats that may start at once: if a whole class did, each would be as late as the last.
STARTS = asyncio.Semaphore(2 * (os.cpu_count() or 1))
GITCONFIG = Path(__file__).with_name("gitconfig")


class SeatError(RuntimeError):
    """One sentence that names the problem and its fix."""

    @property
    def jupyterhub_message(self) -> str:
        """The text that JupyterHub's page shows to the learner."""
        return str(self)


def sandbox(
    home: Path,
    sockets: Iterable[tuple[Path, Path]],
    more: Iterable[tuple[Path, Path]] = (),
    hidden: Iterable[Path] = (),
    devices: Iterable[str] = (),
    memory: int | None = None,
) -> list[str]:
    """The bubblewrap command in front of a seat's command.

    home      the folder that the seat sees as HOME, the only one that stays
    sockets   (folder or file, its path in the seat): read and written
    more      the same, read-only
    hidden    folders that it does not see, even inside one that it reads
    devices   patterns of devices that it may use, like /dev/nvidia*
    memory    bytes that the seat may use; /tmp and /dev/shm hold half of it each, because files
              that filled all of it would end everything in the seat, including JupyterLab
    """
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session"]
    words += ["--hostname", "localhost", "--proc", "/proc", "--dev", "/dev"]
    for place in ("/tmp", "/dev/shm"):
        words += [*(["--size", str(memory // 2)] if memory else []), "--tmpfs", place]
    for place in SYSTEM:
        if place.is_symlink():
            words += ["--symlink", str(place.readlink()), str(place)]
        elif place.exists():
            words += ["--ro-bind", str(place), str(place)]
    python = Path(sys.base_prefix)
    readable = [(ROOT, ROOT), (python, python), *more]
    for own, seen in readable:
        if not seen.is_relative_to("/usr"):
            words += ["--ro-bind", str(own), str(seen)]
    for folder in hidden:
        if folder.is_dir() and any(folder.is_relative_to(seen) for _, seen in readable):
            words += ["--tmpfs", str(folder)]
    for own, seen in [(home, HOME), *sockets]:
        words += ["--bind", str(own), str(seen)]
    for device in sorted(found for pattern in devices for found in glob.glob(pattern)):
        words += ["--dev-bind", device, device]
    return [*words, "--chdir", str(HOME)]


def begin(course: Path, branch: str) -> list[str]:
    """The part between bubblewrap and a command: it updates the learner's copy.

    The command runs if a copy exists, up to date or not; the learner's pull.log says which.
    """
    pull = '"$0" "$1" "$2" "$3" >"$HOME/pull.log" 2>&1 || { cat "$HOME/pull.log" >&2; exit 1; }'
    words = [str(ROOT / "docs" / "class" / "pull.sh"), f"file://{course}", branch, str(COPY)]
    return ["sh", "-c", pull + '; shift 3; exec "$@"', *words]


def check_sandbox() -> None:
    """Raise SeatError unless this user can make seats on this machine."""
    try:
        words = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc"]
        words += ["--size", "4096", "--tmpfs", "/tmp", "true"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise SeatError("bubblewrap is missing: apt-get install bubblewrap.") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if reason.endswith("option --size"):
            raise SeatError("bubblewrap is too old: a seat needs 0.7 or newer (bwrap --version).")
        raise SeatError(
            f"This user may not create namespaces on this machine ({reason}): on Ubuntu 24.04+ run "
            "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0; for a container add "
            "--security-opt seccomp=unconfined."
        )


class Seat(LocalProcessSpawner):
    """Starts a seat. `mem_limit` and `cpu_limit` are JupyterHub's own settings, enforced here."""

    homes = Unicode(help="The folder of all learners' homes.").tag(config=True)
    sockets = Unicode(help="A folder for the seats' sockets; short, without capitals.").tag(
        config=True
    )
    hub_socket = Unicode(help="The socket that the hub listens on.").tag(config=True)
    course = Unicode(str(ROOT), help="The git repository that seats copy.").tag(config=True)
    branch = Unicode(help="Its branch.").tag(config=True)
    board = Unicode(
        help="A folder with the socket board.sock of this machine's board (make class); '': none."
    ).tag(config=True)
    process_limit = Integer(
        None, allow_none=True, help="Processes and threads per seat; None: any number."
    ).tag(config=True)
    limited = Bool(True, help="Whether limits are enforced; False: only displayed.").tag(
        config=True
    )
    devices = List(
        Unicode(), help="Patterns of devices that all seats share, such as /dev/nvidia*."
    ).tag(config=True)

    _group: Group | None = None

    @property
    def name_of_seat(self) -> str:
        """The learner's name in a form for file names."""
        return self.user.escaped_name

    @property
    def address(self) -> str:
        """The address of this seat's JupyterLab for the proxy and the hub."""
        path = Path(self.sockets) / self.name_of_seat / SOCKET.name
        return f"http+unix://{quote(str(path), safe='')}"

    @property
    def server(self) -> Server | None:
        """JupyterHub's server. It stores only hosts and ports, so a socket is set again."""
        found = super().server
        if found is not None and not found.connect_url:
            found.connect_url = self.address
        return found

    @server.setter
    def server(self, server: Server | None) -> None:
        LocalProcessSpawner.server.fset(self, server)

    def load_state(self, state: dict) -> None:
        """Seats end with their hub, so a stored process id belongs to another process by now."""
        super().load_state(state)
        self.pid = 0

    def make_preexec_fn(self, name: str) -> Callable[[], None] | None:
        """The function that the seat's first process calls before anything else."""
        return self._group.enter if self._group else None

    def get_env(self) -> dict[str, str]:
        """The environment of the seat, with nothing from the hub's own."""
        self.env_keep = ["LANG", "LC_ALL"]
        environment = super().get_env()
        venv = Path(sys.prefix)
        return environment | {
            "PATH": f"{venv / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(COPY),  # the learner's copy comes before the hub's
            "JUPYTER_CONFIG_PATH": str(SETTINGS),
            # torch would start as many threads as the machine has cores
            "OMP_NUM_THREADS": str(max(1, round(self.cpu_limit or 1))),
            "GIT_CONFIG_SYSTEM": str(GITCONFIG),
            "MAKEFLAGS": r"SETUP=: RUN=python\ -m",  # in a copy, make does not set up a .venv
        }

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        """The learner's identity in the seat, which is not an account of the machine."""
        return env | {
            "USER": self.name_of_seat, "LOGNAME": self.name_of_seat,
            "HOME": str(HOME), "SHELL": "/bin/bash",
        }

    def get_args(self) -> list[str]:
        """The options of JupyterLab."""
        more = [f"--ServerApp.sock={SOCKET}", "--ServerApp.sock_mode=0600"]
        return [*super().get_args(), *more, "--Application.log_level=ERROR"]

    async def start(self) -> str:
        """Start the seat; return its address once it listens. Raises SeatError if it ends first."""
        home = Path(self.homes) / self.name_of_seat
        run = Path(self.sockets) / self.name_of_seat
        for folder in (home, run):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for socket in run.iterdir():
            socket.unlink()
        readable = [(Path(self.course), Path(self.course))]
        if self.limited:
            self._group = Limits().group(
                self.name_of_seat, self.mem_limit, self.cpu_limit, self.process_limit
            )
            readable += self._group.mounts()
        if self.board:
            readable.append((Path(self.board), WAY.parent))
        hub = Path(self.hub_socket)
        words = sandbox(
            home,
            sockets=[(run, SOCKET.parent), (hub, hub)],
            more=readable,
            hidden=[Path(self.homes).resolve().parent, ROOT / ".kintsugi"],
            devices=self.devices,
            memory=self.mem_limit if self.limited else None,
        )
        self.cmd = [*words, *begin(Path(self.course), self.branch), "jupyterhub-singleuser"]
        self.notebook_dir, self.default_url = str(COPY), "/lab/tree/you_are_here.md"
        self.port = 8888  # JupyterLab's own: any other one excludes a socket
        async with STARTS:
            await super().start()
            while not (run / SOCKET.name).exists():  # JupyterHub's start_timeout ends this
                if await self.poll() is not None:
                    raise SeatError(
                        f"The seat of {self.user.name} ended at once; the hub's log says why: ask "
                        "your instructor."
                    )
                await asyncio.sleep(0.1)
        return self.address

    async def _signal(self, sig: int) -> bool:
        """Signal JupyterLab itself, which then ends its kernels; bubblewrap would end everything at
        once, and does so when it is killed."""
        with contextlib.suppress(psutil.Error, IndexError):
            outer = psutil.Process(self.pid)
            if sig and sig != 9:
                outer.children()[0].children()[0].send_signal(sig)
                return True
        return await super()._signal(sig)

    async def stop(self, now: bool = False) -> None:
        """End the seat and everything that it has started."""
        await super().stop(now)
        if self._group:
            self._group.remove()
