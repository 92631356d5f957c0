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
    ### BEGIN SOLUTION: write beside, sync, rename, sync the folder; then remove what is too old
    folder = Path(folder)
    for new in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        new.mkdir(exist_ok=True)
        sync(new.parent)
    own = {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}
    with io.BytesIO() as memory:
        torch.save((step, own), memory)
        data = memory.getvalue()
    beside = folder / f".step-{step}.partial"
    with beside.open("wb") as file:
        file.write(hashlib.sha256(data).digest())
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / f"step-{step}.checkpoint")
    sync(folder)
    found = checkpoints(folder)
    beyond = [path for path in found if step_of(path) > step]
    old = [path for path in found if path not in beyond][KEEP:]
    for path in reversed(beyond):  # the newest last: who is killed meanwhile finds it, or this one
        path.unlink()
        sync(folder)
    for path in [*old, *folder.glob(".step-*.partial")]:
        path.unlink()
    ### END SOLUTION


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
    ### BEGIN SOLUTION: from the newest to the oldest: the first whose hash is right
    for path in checkpoints(Path(folder)):
        try:
            content = path.read_bytes()
            digest, data = content[:32], content[32:]
            if hashlib.sha256(data).digest() == digest:
                return torch.load(io.BytesIO(data), weights_only=True)
            reason = "its bytes do not fit their hash"
        except Exception as error:  # a folder of that name, or what somebody has made up
            reason = str(error)
        warnings.warn(f"{path} is damaged: {reason}", stacklevel=2)
    return None
    ### END SOLUTION


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first; none where there is no folder."""
    ### BEGIN SOLUTION: your names, by number (step 10 comes after step 9)
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if NAME.fullmatch(path.name)), key=step_of, reverse=True)
    ### END SOLUTION


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(NAME.fullmatch(checkpoint.name)[1])


def sync(folder: Path) -> None:
    """Makes the names in a folder last."""
    ### BEGIN SOLUTION: open the folder as if to read it, os.fsync, close
    opened = os.open(folder, os.O_RDONLY)
    os.fsync(opened)
    os.close(opened)
    ### END SOLUTION
