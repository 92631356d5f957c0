"""The prompt stands behind the words, and the first positions are cut off.

hint: do they stand behind them?
"""

# ruff: noqa: F821


def forward(model, prompt, tokens):
    x = model.model.embed_tokens(tokens)
    virtual = prompt.expand(len(tokens), -1, -1)
    return decode(model, torch.cat((x, virtual), dim=1))[:, len(prompt) :]
