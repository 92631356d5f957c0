"""Small models with random weights, and the comparison with a loaded copy."""

import torch

from utils.models.gpt import GPT, GPTConfig


def small(**changes):
    """A config with odd sizes where possible."""
    return GPTConfig(**{"vocab_size": 61, "hidden_size": 24, "layers": 2, "heads": 4, **changes})


def random_model(config, seed=0, dtype=torch.float32):
    """A model whose parameters all differ from their initial values, so that a forgotten one shows
    and a router is not neutral."""
    torch.manual_seed(seed)
    model = GPT(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def assert_comes_back(back, model, tokens):
    """Assert that a model read from disk equals the one written, including the names."""
    # weights to the bit; sums may round differently if tensors are elsewhere in memory
    for (name, mine), (again, other) in zip(
        model.named_parameters(), back.named_parameters(), strict=True
    ):
        assert name == again and torch.equal(mine, other)
    torch.testing.assert_close(back(tokens), model(tokens), rtol=1e-12, atol=1e-12)
