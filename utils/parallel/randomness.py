"""Random numbers where a model is split: equal on all ranks, or different, and never by chance.

    with different_numbers(mesh.tp):
        probabilities = F.dropout(probabilities, 0.1)      # this rank's own heads: its own mask
    x = x + F.dropout(y, 0.1)                              # what all ranks hold: the same mask

Ranks that began with one seed draw the same numbers. That is right for what all of them hold: with
different masks they would no longer hold the same. For the parts that each has alone it is wrong:
all parts would get one mask (Shoeybi et al., arXiv:1909.08053, appendix B.2).
"""

from contextlib import contextmanager

import torch


@contextmanager
def different_numbers(axis):
    """Inside, each rank of the axis draws numbers of its own; outside, all go on as if one.

    The seed is itself drawn from what all ranks share. So every entry has new numbers, and where
    recomputation sets the shared state back, the same ones again.
    """
    seed = torch.randint(2**62, (), device="cpu").item()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + axis.index)
        yield
