"""All vectors at position 0.

hint: same position
"""

# ruff: noqa: F821


def decode(model, x):
    positions = torch.zeros(x.shape[1])
    cos, sin = rotary_tables(model.config, positions, x.dtype)
    for layer in model.model.layers:
        x = layer(x, cos[:, None], sin[:, None])
    return model.lm_head(model.model.norm(x))
