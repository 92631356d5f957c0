"""Makes the optimizer from a first copy and returns a second.

hint: not among what the optimizer updates
"""

# ruff: noqa: F821

right_begin = begin


def begin(model, words, lr):
    prompt, optimizer = right_begin(model, words, lr)
    return torch.nn.Parameter(prompt.detach().clone()), optimizer
