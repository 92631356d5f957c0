"""The text is written to a file instead of returned.

hint: config returns NoneType, not the text of the file
"""

# ruff: noqa: F821

from pathlib import Path

right = config


def config(tp):
    Path("config.pbtxt").unlink(missing_ok=True)
