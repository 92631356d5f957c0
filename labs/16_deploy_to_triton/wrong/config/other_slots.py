"""Another number of slots than was asked for.

hint: the parameter slots is “1”, not “4”
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace('string_value: "4"', 'string_value: "1"')
