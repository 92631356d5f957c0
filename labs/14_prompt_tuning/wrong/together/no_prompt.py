"""Forgets the prompts.

hint: no prompt before it
"""

# ruff: noqa: F821


def together(model, prompts, task, tokens):
    return decode(model, model.model.embed_tokens(tokens))
