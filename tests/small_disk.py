"""A disk small enough to fill."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(parent: Path, size: int) -> Iterator[Path]:
    """A folder in `parent` on its own file system of `size` bytes; skips where none can be made."""
    folder = parent / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("making a small disk needs root and Linux")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
