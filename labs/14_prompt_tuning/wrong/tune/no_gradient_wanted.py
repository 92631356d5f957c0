"""A copy that does not ask for a gradient.

hint: leaf that requires a gradient
"""

# ruff: noqa: F821


def begin(model, words, lr):
    model.requires_grad_(False)
    prompt = model.model.embed_tokens.weight.detach()[words].clone()
    return prompt, torch.optim.Adam([prompt], lr=lr)
