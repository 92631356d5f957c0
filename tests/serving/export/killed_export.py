"""Export a model repeatedly, each time killed at a later moment.

    python -m tests.serving.export.killed_export MODEL FOLDER REPOSITORY

FOLDER/new/0008/repo is the state after an export that was killed after 8 changes to the file
system: opening a file to write, making or removing a file or folder, renaming, fsync. Exports in
FOLDER/stored begin with a copy of REPOSITORY. The last export of each kind was not killed; the
program prints the numbers of these two. Each rank has several files of weights.

Modules are imported once and each export is a fork, which is safe as torch has no threads here.
"""

import gc
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from utils.models import hf_format
from utils.serving import shard
from utils.serving.export import export

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
TP, FILE_BYTES = 2, 2000
STEPS = {"new": 2, "stored": 5}


def exports(model, folder, step, repository=None):
    """Kill exports at every `step`th change; return the number of the one that was not killed."""
    for number in range(0, 10_000, step):
        out = folder / f"{number:04d}" / "repo"
        out.parent.mkdir(parents=True)
        if repository is not None:
            shutil.copytree(repository, out)
        child = os.fork()
        if not child:
            _killed_before(number)
            export(model, out, TP)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return number
        if status != -signal.SIGKILL:
            raise RuntimeError(f"export {number} ended with status {status}")
    raise RuntimeError("the export does not end")


def _killed_before(number):
    """Kill this process when it is about to make a change after `number` others."""
    done = 0

    def count():
        nonlocal done
        if done == number:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1

    def audit(event, args):
        writes = event == "open" and isinstance(args[2], int) and args[2] & os.O_ACCMODE
        if event in CHANGES or writes:
            count()

    def counted(function):
        def call(*arguments, **options):
            count()
            return function(*arguments, **options)

        return call

    os.fsync = counted(os.fsync)  # the two changes that Python does not report
    hf_format.save_file = counted(hf_format.save_file)
    sys.addaudithook(audit)


def main(model, folder, repository):
    torch.set_num_threads(1)
    shard.FILE_BYTES = FILE_BYTES
    export(model, Path(folder) / "warm-up", TP)  # runs the late imports
    gc.freeze()  # keeps forks from touching and so copying it
    new = exports(model, Path(folder) / "new", STEPS["new"])
    stored = exports(model, Path(folder) / "stored", STEPS["stored"], repository)
    print(new, stored)


if __name__ == "__main__":
    main(*sys.argv[1:])
