"""Small models with random weights, and what a checkpoint must bring back."""

import torch

from utils.models.gpt import GPT, GPTConfig


def small(**changes):
    """Sizes that are odd where they may be."""
    return GPTConfig(**{"vocab_size": 61, "hidden_size": 24, "layers": 2, "heads": 4, **changes})


def random_model(config, seed=0, dtype=torch.float32):
    """A model none of whose parameters has its first value: a forgotten one shows, and a router has
    something to say."""
    torch.manual_seed(seed)
    model = GPT(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def assert_comes_back(back, model, tokens):
    """A model that was read is the one that was written, under the same names."""
    # the weights to the bit; sums may round otherwise where tensors lie elsewhere in memory
    for (name, mine), (again, other) in zip(
        model.named_parameters(), back.named_parameters(), strict=True
    ):
        assert name == again and torch.equal(mine, other)
    torch.testing.assert_close(back(tokens), model(tokens), rtol=1e-12, atol=1e-12)
