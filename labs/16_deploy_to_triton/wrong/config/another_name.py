"""The output has another name than the model gives it.

hint: there is no output output_ids. The server knows: tokens
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace("output_ids", "tokens")
