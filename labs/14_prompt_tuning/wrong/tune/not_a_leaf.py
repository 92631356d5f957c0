"""The prompt is computed from the embedding: no optimizer takes it.

hint: is not a leaf
"""

# ruff: noqa: F821


def begin(model, words, lr):
    prompt = model.model.embed_tokens(words)
    model.requires_grad_(False)
    return prompt, torch.optim.Adam([prompt], lr=lr)
