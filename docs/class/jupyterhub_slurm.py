"""JupyterHub on a Slurm cluster: each learner's JupyterLab is a job on a compute node.

    COURSE/.venv/bin/jupyterhub -f COURSE/docs/class/jupyterhub_slurm.py    # as root: see slurm.md

The hub runs on a machine where `sbatch` works, and asks PAM to check the learner's password. A job
is the learner's own: the account's limits on the cluster apply to its lab, too.
"""

import asyncio
import sys
from html import escape
from pathlib import Path

import batchspawner.batchspawner  # also adds the address at which a job tells the hub its port

from utils.hub import proxy

c = get_config()  # noqa: F821

# ---- settings of a site

COURSE = Path(__file__).resolve().parents[2]  # a clone with its .venv, visible on all nodes
REPOSITORY = f"file://{COURSE}"  # the source of learners' clones: nodes need no internet for it
BRANCH = "main"
GROUP = "kintsugi"  # the Unix group of users who may log in
PROFILES = {  # the learner's choices: options of sbatch
    "4 cores, 8 GB, 4 hours": "--cpus-per-task=4 --mem=8G --time=4:00:00",
    "2 GPUs, 16 cores, 64 GB, 2 hours": "--gpus=2 --cpus-per-task=16 --mem=64G --time=2:00:00",
}
IDLE = 3600  # seconds: a lab ends after this time without a learner and without a busy kernel

# ---- the hub

c.JupyterHub.bind_url = "http://127.0.0.1:8000"  # behind a reverse proxy with TLS
c.JupyterHub.hub_ip = "0.0.0.0"  # labs talk to the hub from their nodes
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}  # show the waiting page at once
c.ConfigurableHTTPProxy.command = proxy.set_up()
c.JupyterHub.cleanup_servers = False  # labs outlive the hub; it finds them again after a restart
c.JupyterHub.authenticator_class = "pam"
c.LocalAuthenticator.allowed_groups = {GROUP}

CULLER = [sys.executable, "-m", "jupyterhub_idle_culler", f"--timeout={IDLE}"]
MAY = ["list:users", "read:users:activity", "read:servers", "delete:servers"]
c.JupyterHub.services = [{"name": "culler", "command": CULLER}]
c.JupyterHub.load_roles = [{"name": "culler", "services": ["culler"], "scopes": MAY}]

# ---- a learner's job

BIN = COURSE / ".venv" / "bin"


class LabSpawner(batchspawner.SlurmSpawner):
    """Ends a start when its job ends: batchspawner 1.3 would wait for all of start_timeout."""

    async def start(self) -> tuple[str, int]:
        """(host, port) of JupyterLab. Raises RuntimeError if the job ends first."""
        starting, gone = (
            asyncio.create_task(super().start()),
            batchspawner.batchspawner.JobStatus(0),
        )
        try:
            while not (await asyncio.wait([starting], timeout=3))[0]:
                if self.job_id and await self.query_job_status() == gone:
                    raise RuntimeError("The job ended; kintsugi-lab.log in the home says why.")
            return await starting
        finally:
            starting.cancel()


c.JupyterHub.spawner_class = LabSpawner
# Run sbatch, squeue and scancel as the learner, with the lab's variables and no others.
c.SlurmSpawner.exec_prefix = "runuser --preserve-environment -u {username} --"
c.SlurmSpawner.env_keep = ["PATH", "LANG", "SLURM_CONF"]
c.SlurmSpawner.environment = {
    "OMP_NUM_THREADS": "1",  # a rank uses one core
    "JUPYTER_CONFIG_PATH": str(COURSE / "utils" / "workshop" / "lab_settings"),
}
c.SlurmSpawner.batchspawner_singleuser_cmd = str(BIN / "batchspawner-singleuser")
c.SlurmSpawner.cmd = [str(BIN / "jupyterhub-singleuser")]
c.SlurmSpawner.notebook_dir = "~/kintsugi"
c.SlurmSpawner.default_url = "/lab/tree/you_are_here.md"
c.SlurmSpawner.start_timeout = 600  # seconds, including the wait in the queue

# The learner's clone gets the course's changes and keeps the learner's edits; its utils and labs
# come before those of COURSE. If it cannot pull, the clone opens as it is.
# safe.directory: without it, git refuses to read a repository that belongs to another account.
# MAKEFLAGS: in a clone, make does not set up a .venv.
# No srun: it may bind the lab to one core, whatever the job has (Slurm 22.05 and newer).
c.SlurmSpawner.batch_script = rf"""#!/bin/bash -l
#SBATCH --job-name=kintsugi-lab
#SBATCH --output={{{{homedir}}}}/kintsugi-lab.log
#SBATCH --chdir={{{{homedir}}}}
#SBATCH --export={{{{keepvars}}}}
#SBATCH --nodes=1 --ntasks=1 {{{{options}}}}
set -euo pipefail
git config --global --fixed-value --replace-all safe.directory {COURSE}/.git {COURSE}/.git
PATH={BIN}:$PATH {COURSE}/docs/class/pull.sh {REPOSITORY} {BRANCH} "$HOME/kintsugi"
export PYTHONPATH="$HOME/kintsugi" MAKEFLAGS='SETUP=: RUN={BIN}/python\ -m'
exec {{{{cmd}}}}
"""


def options_form(spawner: batchspawner.SlurmSpawner) -> str:
    """The page on which a learner chooses one of PROFILES."""
    choices = "".join(f"<option>{escape(name)}</option>" for name in PROFILES)
    return f'<select class="form-control" name="profile">{choices}</select>'


def apply_user_options(spawner: batchspawner.SlurmSpawner, options: dict) -> None:
    """Apply the chosen profile; KeyError (for the learner: 400) for an unknown one.

    Nothing else is kept: batchspawner would let any option replace a word of the script.
    """
    profile = options.get("profile", next(iter(PROFILES)))
    spawner.req_options = PROFILES[profile]
    spawner.user_options = {"profile": profile}


c.SlurmSpawner.options_form = options_form
c.SlurmSpawner.options_from_form = lambda form: {"profile": form["profile"][0]}
c.SlurmSpawner.apply_user_options = apply_user_options
