"""The fixture for the tests of a class."""

import pytest

from tests.small_disk import small_disk


@pytest.fixture
def disk(tmp_path):
    """A folder on its own file system of 2 MB."""
    with small_disk(tmp_path, 2 * 2**20) as folder:
        yield folder
