"""What the tests of a class share."""

import pytest

from tests.small_disk import small_disk


@pytest.fixture
def disk(tmp_path):
    """A folder on a file system of its own, of 2 MB."""
    with small_disk(tmp_path, 2 * 2**20) as folder:
        yield folder
