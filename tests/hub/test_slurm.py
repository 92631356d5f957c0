"""docs/class/jupyterhub_slurm.py: a learner logs in, and JupyterLab is a job.

The hub, its proxy, the job script and JupyterLab are real. So is Slurm if its daemons are
installed: a controller and a node on this machine, which write only to the test's folder.
Otherwise, stand-ins for sbatch, squeue and scancel start the script, look for it and end it.
PAM and other accounts are not tested: the learner is the user who runs the tests.
"""

import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.browser.jupyterlab import free_ports
from tests.classroom.boards import until
from tests.hub.visitor import Visitor
from utils.paths import ROOT
from utils.ranks import slurm
from utils.ranks.supervise import Child, end, supervised

pytestmark = pytest.mark.thorough

CONFIG = ROOT / "docs" / "class" / "jupyterhub_slurm.py"
USER, PASSWORD = getpass.getuser(), "of-a-test"
MISSING = slurm.missing()
PROFILE = "4 cores, 8 GB, 4 hours"

# The site: the course's settings, except what a test cannot have.
SITE = """
import os

load_subconfig({config!r})
c = get_config()

class InScratch(c.JupyterHub.spawner_class):
    def _req_homedir_default(self):
        return {home!r}

    def user_env(self, env):
        return super().user_env(env) | {{"HOME": {home!r}}}

c.JupyterHub.spawner_class = InScratch
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = {password!r}
c.Authenticator.allowed_users = {{{user!r}}}
c.JupyterHub.bind_url = "http://127.0.0.1:{ports[0]}"
c.JupyterHub.hub_ip, c.JupyterHub.hub_port = "127.0.0.1", {ports[1]}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{ports[2]}"
if os.geteuid():
    c.SlurmSpawner.exec_prefix = ""
else:
    c.SlurmSpawner.args = ["--allow-root"]
"""

# One node, this machine, which claims the cores and memory of PROFILE.
NODE = "NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=8192\n"

# A job's ID is its process group.
STAND_INS = {
    "sbatch": """cat >"$0.script" && cd "$HOME"
setsid bash "$0.script" >"$0.log" 2>&1 &
echo $!""",
    "squeue": 'kill -0 "$3" && echo RUNNING localhost',
    "scancel": 'kill -TERM -- "-$1"',
}

# The ranks stay open: stopping the lab must end them as well.
CELL = """
import json, os
import torch
import utils
from utils.ranks import Ranks

def total():
    value = torch.ones(1)
    torch.distributed.all_reduce(value)
    return value.item()

ranks = Ranks(2)
job = os.environ.get("SLURM_JOB_ID")
print(json.dumps([ranks.run(total), utils.__file__, os.environ["OMP_NUM_THREADS"], job]))
"""


@contextlib.contextmanager
def running(command: list[str], log: Path, **variables: str):
    """Run a program under a supervisor, and end it with all that it started."""
    with log.open("w") as out:
        child = Child(supervised(command), output=out, env={**os.environ, **variables})
    try:
        yield child
    finally:
        end([child], 20)


@pytest.fixture(params=["Slurm", "stand-ins"])
def scheduler(request, tmp_path):
    """The environment variables that lead to sbatch, squeue and scancel."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    if request.param == "stand-ins":
        for name, text in STAND_INS.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        yield {"PATH": path}
        return
    if MISSING:
        pytest.skip(MISSING)
    host = socket.gethostname().partition(".")[0]
    ports = free_ports(2)
    conf = slurm.configure(folder, f"{host}(127.0.0.1)", USER, ports, NODE.format(host=host))
    variables = {"SLURM_CONF": str(conf)}
    with contextlib.ExitStack() as stack:
        for name in ("slurmctld", "slurmd"):
            log = folder / f"{name}.log"
            stack.enter_context(running([name, "-D", "-f", str(conf)], log, **variables))
        look = ["sinfo", "--noheader", "--format=%T"]
        environment = {**os.environ, **variables}
        until(
            lambda: subprocess.run(look, env=environment, capture_output=True).stdout == b"idle\n"
        )
        yield variables


@pytest.fixture
def course(tmp_path):
    """The folder shared by all nodes: a git repository with the course's .venv."""
    folder = tmp_path / "course"
    for part in ("utils", "docs/class"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    (folder / "README.md").write_text("first line\n\nlast line\n")
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=test", "-c", "user.email=@", "commit", "--quiet", "--message=a")


def processes_at(home: Path) -> list[psutil.Process]:
    """The processes with this HOME: the job, its kernels and their ranks."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # just ended, or another user's
            if process.environ().get("HOME") == str(home):
                found.append(process)
    return found


@pytest.fixture
def hub(scheduler, course, tmp_path):
    """The address of a hub with the course's settings; its learner's home is tmp_path / "home"."""
    home, site, ports = tmp_path / "home", tmp_path / "hub", free_ports(3)
    home.mkdir()
    site.mkdir()
    config = str(course / "docs" / "class" / CONFIG.name)
    facts = {"config": config, "home": str(home), "user": USER, "password": PASSWORD}
    (site / "site.py").write_text(SITE.format(ports=ports, **facts))
    log = site / "hub.log"  # the hub writes its own files here as well
    words = ["sh", "-c", 'cd "$0" && exec "$@"', str(site), sys.executable, "-m", "jupyterhub"]
    with running([*words, "--config=site.py"], log, **scheduler) as process:

        def up():
            assert process.returncode is None, log.read_text()
            return "is now running at" in log.read_text()

        until(up)
        yield f"http://127.0.0.1:{ports[0]}"
    for left in processes_at(home):  # none, unless the test failed
        left.kill()


def test_a_learner_works_in_a_job(hub, course, scheduler, tmp_path):
    learner, home = Visitor(hub, USER, PASSWORD), tmp_path / "home"
    assert PROFILE in learner.log_in()
    path = f"api/users/{USER}/server"
    assert learner.hub("POST", path, json={"profile": "all of it"}).status_code == 400

    # A file is in the clone's place: the job starts and fails, and the learner is told.
    (home / "kintsugi").touch()
    assert learner.hub("POST", path, json={"profile": PROFILE}).ok
    until(lambda: not learner.server())
    (home / "kintsugi").unlink()

    learner.start(profile=PROFILE)
    sums, imported, threads, job = json.loads(learner.run(CELL))
    assert sums == [2.0, 2.0] and threads == "1"
    assert imported == str(home / "kintsugi" / "utils" / "__init__.py")  # not COURSE's
    assert (job is not None) == ("SLURM_CONF" in scheduler)
    assert len(processes_at(home)) > 4  # JupyterLab, a kernel, two ranks and their forkserver
    learner.stop()
    until(lambda: not processes_at(home))

    # The course and the learner's clone change: the next job has both changes.
    mine = home / "kintsugi" / "README.md"
    mine.write_text(mine.read_text().replace("first", "my"))
    theirs = course / "README.md"
    theirs.write_text(theirs.read_text() + "new line\n")
    commit(course)
    assert learner.hub("POST", path, json={"profile": PROFILE, "cmd": "false"}).ok
    learner.wait()  # `false` would have ended the job
    assert learner.lab("files/README.md").text == "my line\n\nlast line\nnew line\n"
    learner.stop()
    until(lambda: not processes_at(home))
