"""Copies the numbers of the prompt: nothing leads back to it.

hint: the prompt gets no gradient
"""

# ruff: noqa: F821


def forward(model, prompt, tokens):
    x = model.model.embed_tokens(tokens)
    virtual = torch.stack([prompt.data] * len(tokens))
    logits = decode(model, torch.cat((virtual, x), dim=1))
    return logits[:, len(prompt) :]
