"""Leaves the model as it is: all its weights get gradients, in vain.

hint: have got gradients
"""

# ruff: noqa: F821


def begin(model, words, lr):
    prompt = torch.nn.Parameter(model.model.embed_tokens.weight.detach()[words].clone())
    return prompt, torch.optim.Adam([prompt], lr=lr)
