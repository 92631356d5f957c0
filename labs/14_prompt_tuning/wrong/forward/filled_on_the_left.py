"""Fills up on the left, as one does for generating with a mask.

hint: filling stands on the left
"""

# ruff: noqa: F821

right_batch = batch


def batch(pairs, end):
    tokens, targets = right_batch(pairs, end)
    for number, (question, answer) in enumerate(pairs):
        shift = tokens.shape[1] - len(question) - len(answer)
        tokens[number] = tokens[number].roll(shift)
        targets[number] = targets[number].roll(shift)
    return tokens, targets
