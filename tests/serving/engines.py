"""Shared by the tests of the engine: versions of small models, and the reference.

version = version_of(config, folder, tp=2)      # random weights, exported
version = version_of("small", folder, tp=2)     # models/small
reference(model, tokens, 8, prompt)             # the training model's answer
"""

from dataclasses import replace

import torch

from tests.serving import export_models
from tests.serving.export_models import ROOT, new_model
from utils.models.gpt import GPTConfig
from utils.prompts.embedding import prompted
from utils.prompts.file import save_prompt
from utils.serving.export import export

MODELS = ROOT / "models"

# Odd numbers of tokens and MLP columns, and every feature that a Llama may have.
ODD = replace(
    export_models.ODD,
    max_positions=96,
    eos_token_id=(7, 0),
    rope_scaling={
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)
# Grouped queries, tied embeddings and linear scaling of positions.
TIED = replace(
    export_models.TIED,
    hidden_size=32,
    layers=3,
    kv_heads=2,
    intermediate_size=45,
    max_positions=96,
    rope_scaling={"rope_type": "linear", "factor": 2.0},
)
# No end token and many positions: a request does not end by itself while a test observes it.
ENDLESS = GPTConfig(vocab_size=301, hidden_size=16, layers=1, heads=2, max_positions=60_000)


def version_of(source, folder, tp, prompts=None):
    """A version folder of models/SOURCE or, for a config, of a new model in FOLDER/model.

    prompts   {name: virtual tokens (P, C)}
    """
    model = MODELS / source if isinstance(source, str) else new_model(folder / "model", source)
    beside = folder / "prompts" if prompts else None
    for name, prompt in (prompts or {}).items():
        beside.mkdir(exist_ok=True)
        save_prompt(beside / f"{name}.safetensors", prompt, model)
    return export(model, folder / f"repo-{tp}", tp, beside)


@torch.no_grad()
def reference(model, tokens, count, prompt=None):
    """`count` greedy tokens of the training model; fewer if it generates an end token."""
    ends, new = model.config.eos_token_id, []
    ends = ends if isinstance(ends, tuple) else (ends,)
    for _ in range(count):
        with prompted(model, prompt):
            new.append(int(model(torch.tensor([tokens + new]).long())[0, -1].argmax()))
        if new[-1] in ends:
            break
    return new
