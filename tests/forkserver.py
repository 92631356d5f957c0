"""What the forkserver imports last in tests, which make thousands of ranks.

Its memory then lies in pages of 2 MiB. A fork copies its parent's page table, and the kernel takes
it apart again when the fork ends: half of the processor time of a rank that does little. Linux from
6.1 on joins pages where it is asked to; elsewhere everything stays as it is.
"""

import ctypes
import importlib
from pathlib import Path

from utils.imports import collector_at_rest

# What many ranks would else import anew.
MODULES = ("utils.course.observe", "utils.course.messages", "utils.training.train")
MADV_COLLAPSE = 25
SIZE = 1 << 21  # bytes


def join_pages() -> None:
    """Joins what this process has written in memory that no file backs."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    for line in maps.read_text().splitlines():
        area, rights, _, _, _, *name = line.split(maxsplit=5)
        if "w" in rights and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in area.split("-"))
            for page in range(-(-begin // SIZE) * SIZE, end - SIZE + 1, SIZE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(SIZE), MADV_COLLAPSE)


with collector_at_rest():
    for name in MODULES:
        importlib.import_module(name)
join_pages()
