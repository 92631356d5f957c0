"""The embedding itself learns, and with it the model.

hint: not a tensor (P, C)
"""

# ruff: noqa: F821


def begin(model, words, lr):
    model.requires_grad_(False)
    prompt = model.model.embed_tokens.weight.requires_grad_()
    return prompt, torch.optim.Adam([prompt], lr=lr)
