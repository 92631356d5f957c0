"""A learning rate that is right for weights moves so few numbers too little.

hint: need a learning rate a hundred times
"""

# ruff: noqa: F821


def tune(model, words, batches):
    prompt, optimizer = begin(model, words, lr=3e-4)
    for tokens, targets in batches:
        step(model, prompt, optimizer, tokens, targets)
    return prompt.detach()
