"""A disk that can be full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(parent: Path, size: int) -> Iterator[Path]:
    """A folder in `parent` on a file system of its own, of `size` bytes; else the test skips."""
    folder = parent / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs root, and Linux, to make a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
