"""`%%ranks`: a cell that runs on every rank of the newest open `Ranks`, or on some of them.

%%ranks 0,2
print(rank)
"""

import sys
import weakref

pools: list[weakref.ref] = []  # the open `Ranks`, newest last: `utils.ranks.pool` keeps the list


def register_magic() -> None:
    """Makes `%%ranks` known where there is a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.register_magic_function(ranks_magic, "cell", "ranks")


def ranks_magic(line: str, cell: str) -> None:
    """Runs the cell; the line names ranks: "0,2", "0 2" or nothing."""
    open_pools = [pool() for pool in pools if pool() is not None]
    if not open_pools:
        raise _error("No ranks are open: run `ranks = Ranks(4)` in a cell first.")
    pool = open_pools[-1]
    pool.cell(cell, parse_ranks(line, pool.size))


def parse_ranks(line: str, size: int) -> list[int] | None:
    """ "0,2" -> [0, 2]; "" -> None, which means all. Raises RankError for what is no rank."""
    words = line.replace(",", " ").split()
    if not words:
        return None
    if not all(word.isdigit() and int(word) < size for word in words):
        raise _error(f"%%ranks {line.strip()}: give ranks from 0 to {size - 1}, like 0,{size - 1}")
    return sorted({int(word) for word in words})


def _error(text: str) -> RuntimeError:
    from utils.ranks.diagnosis import RankError  # with torch, which the magic alone does not need

    return RankError(text)
