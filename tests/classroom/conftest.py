"""A disk that can be full."""

import subprocess

import pytest


@pytest.fixture
def disk(tmp_path):
    """A folder on a file system of its own, of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={2 * 2**20}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs root, and Linux, to make a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
