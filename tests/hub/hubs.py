"""A hub as `make hub` runs it: under a user other than root, in that user's control groups.

As root, a test gives it an unused user ID, access to its Python, and groups inside the test's own.
Under any other user, the hub runs as that user, without limits.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from tests.browser.jupyterlab import free_port
from tests.classroom.boards import until
from tests.patience import patience
from utils.hub import proxy
from utils.hub.limits import Limits
from utils.hub.seat import SeatError, check_sandbox
from utils.paths import ROOT

USER = 61234  # an unused user ID
CAN_LIMIT = os.geteuid() == 0
GIT = ["git", "-c", "safe.directory=*"]


def need_seats():
    """Skip if this machine cannot make seats; on CI that is an error."""
    try:
        check_sandbox()
    except SeatError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def as_user(words, folders, groups, scratch):
    """The command line that runs `words` as USER, with access to `folders`, in these groups.

    Parent folders that are closed to others are opened in the command's own mount namespace.
    """
    lines = ["set -e", *(f"echo $$ > {group}/cgroup.procs" for group in groups)]
    closed = {}
    for folder in map(Path, folders):
        shut = [parent for parent in reversed(folder.parents) if not parent.stat().st_mode & 0o001]
        if shut:
            closed.setdefault(shut[0], []).append(folder)
    for number, (parent, inside) in enumerate(closed.items()):
        kept = scratch / f"kept{number}"
        lines += [f"mkdir {kept}", f"mount --rbind {parent} {kept}"]
        lines += [f"mount -t tmpfs -o mode=755 none {parent}"]
        for folder in inside:
            kept_folder = kept / folder.relative_to(parent)
            lines += [f"mkdir -p {folder}", f"mount --rbind {kept_folder} {folder}"]
    lines += [f'exec setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs "$@"']
    return ["unshare", "--mount", "sh", "-c", "\n".join(lines), "hub", *words]


class RunningHub:
    """A context manager: a hub in its own process.

    words    additional options of `python -m utils.hub`
    config   the text of its --config
    """

    def __init__(self, *words, config=""):
        self.words, self.config, self.port = words, config, free_port()
        self.address = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self.resources = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            self.resources.close()
            raise
        return self

    def __exit__(self, *_):
        self.resources.close()

    def _start(self):
        # not in pytest's folder, which others cannot read
        place = self.resources.enter_context(tempfile.TemporaryDirectory(prefix="hub-"))
        self.place, self.log = Path(place), Path(place) / "log"
        self.course = self.place / "course"
        self.folder = self.course / ".kintsugi" / "hub"  # in the seats' course, as by default
        self._copy_course()
        proxy.set_up()  # as the owner of the tests' folder
        self.folder.mkdir(parents=True)
        config = self.place / "config.py"
        config.write_text(self.config)
        command = [
            sys.executable, "-m", "utils.hub", "--port", str(self.port),
            "--folder", str(self.folder), "--course", str(self.course),
            "--config", str(config), *self.words,
        ]
        if CAN_LIMIT:
            for folder in (self.place, self.folder):
                os.chown(folder, USER, USER)
            command = as_user(command, [ROOT, Path(sys.base_prefix)], self._groups(), self.place)
        else:
            command.append("--no-limits")
        environment = {"PATH": os.environ["PATH"], "HOME": place, "PYTHONPATH": str(ROOT)}
        environment["RUNTIME_DIRECTORY"] = place  # also for its sockets
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.resources.callback(self.stop)
        until(self._listens, 60)

    def _copy_course(self):
        """Clone the course, onto a branch even if the tests' repository has none."""
        clone = ["clone", "-q", "--depth", "1", f"file://{ROOT}", str(self.course)]
        subprocess.run([*GIT, *clone], check=True, timeout=patience(60))
        subprocess.run([*GIT, "-C", str(self.course), "switch", "-qC", "main"], check=True)

    def _groups(self):
        """Make control groups for USER inside those of the tests."""
        found = []
        for parent in dict.fromkeys(Limits().folders.values()):
            group = parent / f"kintsugi-test-{self.port}"
            group.mkdir()
            self.resources.callback(until, lambda group=group: removed(group))
            for path in (group, *group.iterdir()):
                os.chown(path, USER, USER)
            found.append(group)
        return found

    def _listens(self):
        assert self.process.poll() is None, self.said()
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.address}/hub/health", timeout=5).close()
            return True

    def said(self):
        """The hub's output."""
        return self.log.read_text(errors="replace")

    @property
    def url(self):
        """The address that learners open."""
        return re.search(r"Learners open\s+(\S+)", self.said())[1]

    def seat(self, name):
        """The address of a learner's JupyterLab."""
        apart = self.url if self.url == self.address else self.url.replace("//", f"//{name}.")
        return f"{apart}/user/{name}/"

    def stop(self):
        """End it as systemd does; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience(30))
        self.process.kill()
        return self.process.wait()


def removed(group):
    """Try to remove a control group and those in it; false while a process of it runs."""
    with contextlib.suppress(OSError):
        for inside in [*group.glob("*/"), group]:
            inside.rmdir()
    return not group.exists()
