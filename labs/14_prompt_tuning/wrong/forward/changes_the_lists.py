"""Adds to the lists that it was given.

hint: changes the lists
"""

# ruff: noqa: F821

right_batch = batch


def batch(pairs, end):
    tokens, targets = right_batch(pairs, end)
    for question, answer in pairs:
        question += answer
    return tokens, targets
