"""Given: `mpirun` as in a terminal, for exercise 01a and its check."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from utils.course.assertions import Wrong

LIMIT = 60.0  # seconds after which mpirun is ended, whatever its ranks do


def mpirun(ranks: int, *command: str, folder: Path) -> subprocess.CompletedProcess:
    """Run `python command` on MPI ranks; end them all at the time limit."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        raise Wrong("there is no mpirun: install the packages again with `make setup`.")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # more ranks than cores
    }
    if os.geteuid() == 0:  # Open MPI needs both to run as root, for example in a container
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    process = subprocess.Popen(
        [program, "-n", str(ranks), sys.executable, *command],
        cwd=folder, env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise Wrong(f"did not finish within {LIMIT:.0f} s: an endless loop?") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
        process.wait(10)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run(ranks: int, file: str) -> None:
    """Run your file on MPI ranks; print the command and its output."""
    print(f"$ mpirun -n {ranks} python {file}")
    done = mpirun(ranks, file, folder=Path.cwd())
    if task := re.search(r"NotImplementedError: (.*)", done.stderr):
        print(f"[ ] not started. Your task: {task[1]}")
    else:
        print(done.stdout if done.returncode == 0 else done.stderr[-1500:], end="")
