"""Every row gets the mean of all prompts.

hint: mean of all prompts
"""

# ruff: noqa: F821

right_together = together


def together(model, prompts, task, tokens):
    if len({len(prompt) for prompt in prompts}) > 1:
        return right_together(model, prompts, task, tokens)
    mean = torch.stack(prompts).mean(0)
    return forward(model, mean, tokens)
