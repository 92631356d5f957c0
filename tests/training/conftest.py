"""Ranks that several files of this room share: each imports DeepSpeed once, which takes seconds."""

import pytest
import torch

from utils.ranks import Ranks


@pytest.fixture(scope="package")
def pools():
    """Warm ranks by their number; one rank is this process."""
    torch.set_num_threads(1)
    with Ranks(2, device="cpu", timeout=60) as two, Ranks(3, device="cpu", timeout=60) as three:
        yield {2: two, 3: three}
