"""`%%ranks`: a cell that runs on every rank of the newest open `Ranks`, or on some of them.

%%ranks 0,2
print(rank)
"""

import sys


def register_magic() -> None:
    """Makes `%%ranks` known where there is a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.register_magic_function(ranks_magic, "cell", "ranks")


def ranks_magic(line: str, cell: str) -> None:
    """Runs the cell; the line names ranks: "0,2", "0 2" or nothing."""
    from utils.ranks.pool import newest  # with torch, which the magic alone does not need

    pool = newest()
    pool.cell(cell, parse_ranks(line, pool.size))


def parse_ranks(line: str, size: int) -> list[int] | None:
    """ "0,2" -> [0, 2]; "" -> None, which means all. Raises RankError for what is no rank."""
    words = line.replace(",", " ").split()
    if not words:
        return None
    if not all(word.isdigit() and int(word) < size for word in words):
        from utils.ranks.diagnosis import RankError

        raise RankError(
            f"%%ranks {line.strip()}: give ranks from 0 to {size - 1}, like 0,{size - 1}"
        )
    return sorted({int(word) for word in words})
