"""The process of one part: `python -m tests.gpu.child MODULE:FUNCTION [--rehearse]`.

Every row is a line of JSON on standard output; all other output goes to standard error. The last
line may be {"failed": sentence} or, if a package is not installed, {"skipped": sentence}.
"""

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any


def sentence(error: BaseException) -> str:
    """The line of an error that says what happened: the last line of a traceback in its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt): ", line)]
    line = named[-1] if named else f"{type(error).__name__}: {lines[0] if lines else 'no word'}"
    return line[:300]


def missing(error: BaseException) -> str:
    """"psutil is not installed", if that is the cause; '' if the missing module is one of ours."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"{name} is not installed" if name and name not in ("tests", "utils") else ""


def tried(function: Callable[..., dict], *arguments: Any) -> dict:
    """The figures of a row; {"absent": …} if a package is missing or memory is too small, and
    {"failed": …} for other errors."""
    try:
        return function(*arguments)
    except Exception as error:
        return row_of(error)


def row_of(error: Exception) -> dict:
    """The row that `tried` returns for an error."""
    if isinstance(error, ImportError):
        return {"absent": missing(error) or sentence(error)}
    traceback.print_exception(error)
    if "out of memory" in str(error):
        return {"absent": "does not fit"}
    return {"failed": sentence(error)}


def main() -> int:
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, name = sys.argv[1].split(":")
    try:
        part = getattr(importlib.import_module(module), name)
        for row, figures in part("--rehearse" in sys.argv):
            print(json.dumps([row, figures]), file=rows)
    except Exception as error:
        traceback.print_exc()
        why = {"skipped": missing(error)} if missing(error) else {"failed": sentence(error)}
        print(json.dumps(why), file=rows)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
