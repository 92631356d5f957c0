"""Rank pools that the files of this folder share: importing DeepSpeed in a rank takes seconds."""

import pytest
import torch

from utils.ranks import Ranks


@pytest.fixture(scope="package")
def pools():
    """Warm pools by number of ranks; a single rank runs in this process."""
    torch.set_num_threads(1)
    with Ranks(2, device="cpu", timeout=60) as two, Ranks(3, device="cpu", timeout=60) as three:
        yield {2: two, 3: three}
