"""Begins anew for each batch: what was learned is thrown away.

hint: begin was called
"""

# ruff: noqa: F821


def tune(model, words, batches):
    for tokens, targets in batches:
        prompt, optimizer = begin(model, words, lr=0.1)
        step(model, prompt, optimizer, tokens, targets)
    return prompt.detach()
