"""Cuts off as many logits as there are virtual tokens, at the wrong end.

hint: cut off the first P positions, not the last
"""

# ruff: noqa: F821


def forward(model, prompt, tokens):
    x = model.model.embed_tokens(tokens)
    virtual = prompt.expand(len(tokens), -1, -1)
    logits = decode(model, torch.cat((virtual, x), dim=1))
    return logits[:, : tokens.shape[1]]
