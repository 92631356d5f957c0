"""Joins a checkpoint of one file per rank into a Hugging Face folder of whole tensors.

    python -m utils.training.join RUN FOLDER

RUN is the folder of a run, whose newest undamaged checkpoint is used, or of one checkpoint. The
result holds only the model and opens in transformers; to continue the run, use RUN itself.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from utils.cli import exit_status
from utils.models import hf_format
from utils.training.rank_files import RankFiles
from utils.training.run_folder import newest


def join(run: Path | str, folder: Path | str, max_shard_bytes: int = 5 * 10**9) -> None:
    """Join RUN into FOLDER, with one file of `max_shard_bytes` in memory at a time."""
    checkpoint = newest(run)
    files = RankFiles(checkpoint, "model")
    shapes = files.shapes()
    if not shapes:
        raise hf_format.CheckpointError(f"{checkpoint} has no file per rank: it is already whole")
    with hf_format.replacing(folder) as beside:
        hf_format.write_json(beside / hf_format.CONFIG, hf_format.read_config(checkpoint))
        hf_format.copy_tokenizer(checkpoint, beside)
        sizes = {name: files.nbytes(name, shape) for name, shape in shapes.items()}
        hf_format.write_model(
            beside, sizes, lambda name: files.tensor(name, shapes[name]), max_shard_bytes
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 2:
        print("usage: python -m utils.training.join RUN FOLDER", file=sys.stderr)
        return 2
    return exit_status("utils.training.join", lambda: join(*given), (ValueError,))


if __name__ == "__main__":
    sys.exit(main())
