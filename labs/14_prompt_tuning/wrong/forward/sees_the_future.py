"""No causal mask: every position sees all others.

hint: logits are not the GPT
"""

# ruff: noqa: F821


def decode(model, x):
    attention, before = F.scaled_dot_product_attention, rotary_tables
    positions = torch.arange(x.shape[1])
    cos, sin = before(model.config, positions, x.dtype)
    try:
        F.scaled_dot_product_attention = lambda *a, **k: attention(*a, **{**k, "is_causal": False})
        for layer in model.model.layers:
            x = layer(x, cos[:, None], sin[:, None])
    finally:
        F.scaled_dot_product_attention = attention
    return model.lm_head(model.model.norm(x))
