"""Small checkpoints to export and serve, and helpers for the tests of the export."""

import subprocess
import sys
from pathlib import Path

import torch

from utils.models.gpt import GPT, GPTConfig
from utils.models.tokenizer import Tokenizer
from utils.paths import ROOT
from utils.serving.engine.version import Version

BYTES = GPTConfig(vocab_size=256, hidden_size=16, layers=1, heads=2, intermediate_size=13)
ODD = GPTConfig(  # grouped queries, biases, untied; odd numbers of tokens and MLP columns
    vocab_size=301,
    hidden_size=24,
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=6,
    intermediate_size=37,
    attention_bias=True,
    mlp_bias=True,
    eos_token_id=0,
)
TIED = GPTConfig(
    vocab_size=301, hidden_size=16, layers=1, heads=4, intermediate_size=22, tie_embeddings=True
)


def new_model(folder, config=BYTES, dtype=torch.float32, seed=0, **changes):
    """A checkpoint folder with random weights, and a tokenizer unless tokens are bytes.

    The weights are large enough for each token to depend on many others, and no bias is 0.
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**vars(config), **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    model.to(dtype).save_pretrained(folder)
    if model.config.vocab_size != 256:
        Tokenizer.train(["the ranks of the mesh and their parts"] * 3, 270).save(folder)
    return folder


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        **options,
    )


def hidden(folder):
    """Hidden files that an export left next to a repository."""
    return [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]


def check_whole(folder):
    """Check every file of a version against its manifest."""
    version = Version.read(folder)
    for name in version.manifest["files"]:
        version.verify(name)
    for rank in range(version.tp):
        version.weights(rank)


def parsed_config(file):
    """config.pbtxt, checked as the server does: field names, types and enumerations."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    return text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
