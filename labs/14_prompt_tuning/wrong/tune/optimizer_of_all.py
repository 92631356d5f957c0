"""Hands the model to the optimizer along with the prompt.

hint: numbers besides the prompt
"""

# ruff: noqa: F821

right_begin = begin


def begin(model, words, lr):
    prompt, _ = right_begin(model, words, lr)
    return prompt, torch.optim.Adam([prompt, *model.parameters()], lr=lr)
