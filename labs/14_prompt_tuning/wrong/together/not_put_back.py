"""Sorts the rows by task and forgets to sort the answers back.

hint: sorted and not put back
"""

# ruff: noqa: F821

right_together = together


def together(model, prompts, task, tokens):
    order = task.argsort(stable=True)
    return right_together(model, prompts, task[order], tokens[order])
