"""A parameter's value is a string, always.

hint: the server refuses the model
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace(f'string_value: "{tp}"', f"int64_value: {tp}")
