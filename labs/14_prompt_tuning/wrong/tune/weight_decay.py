"""AdamW, which pulls the prompt towards zero.

hint: weight decay
"""

# ruff: noqa: F821

right_begin = begin


def begin(model, words, lr):
    prompt, _ = right_begin(model, words, lr)
    return prompt, torch.optim.AdamW([prompt], lr=lr)
