"""The workshop's own language models, in three sizes: models/base, models/small, models/tiny.

    model, tokenizer = load("base")               # GPT in fp32, Tokenizer; also "small", "tiny"

`python -m models.build` builds them; models/base/README.md describes them.
"""

from pathlib import Path

import torch

from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.paths import ROOT

MODELS = ROOT / "models"
SIZES = {
    "base": {"layers": 8, "hidden": 256, "heads": 4},
    "small": {"layers": 5, "hidden": 128, "heads": 2},
    "tiny": {"layers": 3, "hidden": 64, "heads": 1},
}


def load(name: str = "base", folder: Path | str = MODELS) -> tuple[GPT, Tokenizer]:
    """(model, tokenizer): one of the shipped models, with its weights in fp32.

    Raises ValueError for an unknown name, CheckpointError (a ValueError) if its folder is missing.
    """
    if name not in SIZES:
        raise ValueError(f"model {name!r} is not one of {', '.join(SIZES)}")
    folder = Path(folder) / name
    return GPT.from_pretrained(folder, dtype=torch.float32).eval(), Tokenizer.load(folder)
