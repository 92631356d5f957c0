"""`%%ranks`: a cell that runs on every rank of an open `Ranks`, or on some of them.

%%ranks                 on the group named `ranks` in the notebook, else on the newest open one
%%ranks pair            on the group named `pair`
%%ranks pair 0,2        on two of its ranks; `%%ranks 0,2` without the name

A name still refers to its group when a section runs again after other groups have opened.
"""

import re
import sys
import weakref
from typing import Any

pools: list[weakref.ref] = []  # the open `Ranks`, newest last; `utils.ranks.pool` keeps it
USUAL = "ranks"


def register_magic() -> None:
    """Register `%%ranks` in a notebook; elsewhere do nothing."""
    if (shell := _shell()) is not None:
        shell.register_magic_function(ranks_magic, "cell", "ranks")


def ranks_magic(line: str, cell: str) -> None:
    """Run the cell; the line names a group, some of its ranks, both or nothing."""
    name, numbers = parse_line(line)
    pool = open_pool(name, _shell().user_ns)
    pool.cell(cell, parse_ranks(numbers, pool.size))


def parse_line(line: str) -> tuple[str, str]:
    """ "pair 0,2" -> ("pair", "0,2"); each may be ""."""
    name = re.match(r"\s*([^\W\d]\w*)?", line)
    return name[1] or "", line[name.end() :].strip()


def open_pool(name: str, variables: dict[str, Any]) -> Any:
    """The open `Ranks` in variable `name`. "": the one named `ranks`, else the newest.

    Raises RankError if there is none.
    """
    found = [pool() for pool in pools if pool() is not None]
    if not found:
        raise _error("No ranks are open: run `ranks = Ranks(4)` in a cell first.")
    names = sorted(
        key
        for key, value in variables.items()
        if not key.startswith("_") and any(value is pool for pool in found)
    )
    if (name or USUAL) in names:
        return variables[name or USUAL]
    if name:
        known = f"this notebook's are {', '.join(names)}" if names else "none has a name"
        raise _error(f"%%ranks {name}: no open ranks have this name; {known}.")
    return found[-1]


def parse_ranks(line: str, size: int) -> list[int] | None:
    """ "0,2" -> [0, 2]; "" -> None, which means all. Raises RankError for anything else."""
    words = line.replace(",", " ").split()
    if not words:
        return None
    if not all(word.isdigit() and int(word) < size for word in words):
        raise _error(f"%%ranks {line.strip()}: give ranks from 0 to {size - 1}, like 0,{size - 1}")
    return sorted({int(word) for word in words})


def _shell():
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def _error(text: str) -> RuntimeError:
    from utils.ranks.diagnosis import RankError  # with torch, which the magic alone does not need

    return RankError(text)
