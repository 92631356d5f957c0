"""The forkserver's last import in tests, which start thousands of ranks.

It joins the forkserver's memory into pages of 2 MiB. A fork copies its parent's page table, which
the kernel tears down when the fork ends: half of the processor time of a rank that does little.
Linux 6.1 and later can join pages; elsewhere nothing changes.
"""

import ctypes
import importlib
from pathlib import Path

from utils.imports import collector_at_rest

# Many ranks would otherwise import these themselves.
MODULES = ("utils.course.observe", "utils.course.messages", "utils.training.train")
MADV_COLLAPSE = 25
SIZE = 1 << 21  # bytes


def join_pages() -> None:
    """Join the pages of this process's writable anonymous memory."""
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
