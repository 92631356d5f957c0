"""Lab 13a: checkpoints that survive kill -9 at any byte, a power cut, and a damaged disk.

    found = load(folder)               # before the training loop: None, or (step, state)
    save(folder, state, step)          # inside it

Only these two are judged, by their docstrings; the other functions are one way to divide the work.

A process can be killed between any two bytes that it writes. The bytes written so far then stay, in
that order, because the system still has them. After a power cut it does not: what is left of a file
is what was synced (`os.fsync` of the file), and what is left of a folder is the names that it held
when it was synced (`os.fsync` of the folder), or any later ones. So a new name can refer to an
empty file.
"""

import hashlib
import io
import os
import re
import warnings
from pathlib import Path

import torch

KEEP = 2
NAME = re.compile(r"step-(\d+)\.checkpoint")


def save(
    folder: str | Path, state: dict[str, torch.Tensor | int | float | bool], step: int
) -> None:
    """Write the checkpoint of `step`, at least 1, into `folder`, which is created if it is missing.

    state: names, any text, with CPU tensors (float64, float32, float16, bfloat16, int64, int32,
    int16, int8, uint8 or bool; of any shape, even views of others) or Python numbers.

    - When it returns, `load` returns this state, even after a power cut.
    - Whenever it is killed, or the power is cut, `load` returns this state or the previous one.
    - When it returns, the folder has this checkpoint and the previous one, and no others, nor
      anything left by a killed `save`. So the disk does not fill up. A view takes space only for
      its own elements.
    - A run may go back: then checkpoints of `step` and of later steps exist, damaged or not. This
      one replaces them.
    - Any one of its files may be damaged later: `load` still returns this or the previous state.
    - If it cannot write, it raises, and existing checkpoints stay.
    - Other files in the folder are not yours, and stay. `state` is not changed.
    """
    raise NotImplementedError(
        "write to another name, sync, rename, sync the folder; then remove old ones"
    )


def load(folder: str | Path) -> tuple[int, dict[str, torch.Tensor | int | float | bool]] | None:
    """(step, state) of the newest checkpoint in `folder` that is not damaged; None: there is none.

    - Tensors have the dtype, shape and bits that they had, and can be written to; numbers have
      their type.
    - Whatever the files contain, it never returns a state that was not saved, and never raises. A
      newer checkpoint that is damaged is named in a warning (`warnings.warn`), by file or folder.
      (One that is missing cannot be.)
    - It only reads: the folder is not changed, and no code in a file is run.
    - The folder may be a copy: the times of its files mean nothing.
    """
    raise NotImplementedError("from the newest to the oldest, return the first whose hash is right")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first; none if there is no folder."""
    raise NotImplementedError("your names, by number (step 10 comes after step 9)")


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(NAME.fullmatch(checkpoint.name)[1])


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    raise NotImplementedError("open the folder for reading, os.fsync, close")
