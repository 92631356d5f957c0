"""The number of ranks stands in the text.

hint: config(1) and config(2) are the same text
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace(f'string_value: "{tp}"', 'string_value: "2"')
