"""The words have the positions that they had without a prompt.

hint: positions start again at the text
"""

# ruff: noqa: F821


def forward(model, prompt, tokens):
    P, T = len(prompt), tokens.shape[1]
    virtual = prompt.expand(len(tokens), -1, -1)
    x = torch.cat((virtual, model.model.embed_tokens(tokens)), dim=1)
    positions = torch.cat((torch.arange(P), torch.arange(T)))
    cos, sin = rotary_tables(model.config, positions, x.dtype)
    for layer in model.model.layers:
        x = layer(x, cos[:, None], sin[:, None])
    return model.lm_head(model.model.norm(x))[:, P:]
