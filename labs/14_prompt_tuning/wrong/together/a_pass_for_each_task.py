"""Right numbers, one task after the other: two passes where one would do.

hint: one pass for all
"""

# ruff: noqa: F821


def together(model, prompts, task, tokens):
    logits = tokens.new_zeros(*tokens.shape, model.config.vocab_size, dtype=prompts[0].dtype)
    for number in task.unique().tolist():
        logits[task == number] = forward(model, prompts[number], tokens[task == number])
    return logits
