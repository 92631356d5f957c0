"""An input that the model knows is not told.

hint: there is no input arrival
"""

# ruff: noqa: F821

import re

right = config


def config(tp):
    return re.sub(r',\s+{ name: "arrival".*?}', "", right(tp))
