"""The model cannot know how many ranks it has.

hint: the same text
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace(f'parameters {{ key: "tp" value {{ string_value: "{tp}" }} }}', "")
