"""Sees one batch, again and again, and knows its questions by heart.

hint: of the batches
"""

# ruff: noqa: F821


def tune(model, words, batches):
    tokens, targets = next(iter(batches))
    prompt, optimizer = begin(model, words, lr=0.1)
    for _ in range(30):
        step(model, prompt, optimizer, tokens, targets)
    return prompt.detach()
