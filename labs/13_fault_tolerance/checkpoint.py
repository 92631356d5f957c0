"""Lab 13a: checkpoints that survive kill -9 at any byte, a power cut, and a damaged disk.

    found = load(folder)               # before the training loop: None, or (step, state)
    save(folder, state, step)          # in it

Only these two are judged, by what they say; the other functions are one way to cut them in pieces.

A process can be killed between any two bytes that it writes. What it has written then stays, in
that order: the system still has it. After a power cut it does not: of a file there is what was
synced (`os.fsync` of the file), and of the names in a folder those that were there when the folder
was synced (`os.fsync` of the folder), or any later ones. So a new name can stand for an empty file.
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
    """Writes the checkpoint of `step`, 1 or more, into `folder`, which is made where it is missing.

    state: names, any text, with CPU tensors (float64, float32, float16, bfloat16, int64, int32,
    int16, int8, uint8 or bool; of any shape, also views of others) or Python's numbers.

    - When it returns, `load` gives this state, also after a power cut.
    - Whenever it is killed, or the power is cut, `load` gives this state or the one before.
    - When it returns, the folder has this checkpoint and the one before, and no other, nor anything
      that a killed `save` has left. So the disk does not fill up. A view takes the room of its own
      numbers only.
    - A run may go back: then checkpoints of `step` and of later steps are there, damaged or not.
      This one takes their place, and those go.
    - Any one of its files may be damaged later: `load` still gives this state or the one before.
    - Where it cannot write, it raises, and what was there stays.
    - What else is in the folder is someone else's, and stays. `state` stays what it is.
    """
    raise NotImplementedError(
        "write beside, sync, rename, sync the folder; then remove what is too old"
    )


def load(folder: str | Path) -> tuple[int, dict[str, torch.Tensor | int | float | bool]] | None:
    """(step, state) of the newest checkpoint in `folder` that is not damaged; None: there is none.

    - Tensors have the dtype, the shape and the bits that they had, and can be written to; numbers
      have their type.
    - Whatever is in the files: it is never a state that was not saved, and nothing is raised. What
      is damaged and newer is named in a warning (`warnings.warn`): a file, or its folder. (What
      is missing cannot be.)
    - It only reads: the folder stays as it is, and no code that stands in a file is run.
    - The folder may be a copy: the times of its files mean nothing.
    """
    raise NotImplementedError("from the newest to the oldest: the first whose hash is right")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first; none where there is no folder."""
    raise NotImplementedError("your names, by number (step 10 comes after step 9)")


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(NAME.fullmatch(checkpoint.name)[1])


def sync(folder: Path) -> None:
    """Makes the names in a folder last."""
    raise NotImplementedError("open the folder as if to read it, os.fsync, close")
