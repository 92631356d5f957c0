"""Starts from random numbers, not from words.

hint: does not start as the embedding
"""

# ruff: noqa: F821


def begin(model, words, lr):
    model.requires_grad_(False)
    weight = model.model.embed_tokens.weight
    prompt = torch.nn.Parameter(torch.randn(len(words), weight.shape[1], dtype=weight.dtype))
    return prompt, torch.optim.Adam([prompt], lr=lr)
