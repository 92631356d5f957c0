"""utils/drawing/data_parallel.py: the picture of the collectives shows what real ranks do."""

import matplotlib.pyplot as plt
import pytest
import torch
import torch.distributed as dist

from utils.drawing import data_parallel as pictures
from utils.ranks import Ranks


def value(origin):
    """A chunk's number: 10^rank, so that a sum cannot be mistaken for anything else."""
    return {None: 0.0, 0: 1.0, 1: 10.0, 2: 100.0, 3: 1000.0, "sum": 1111.0}[origin]


def after(name, before):
    """This rank's chunks after the collective `name`, from its chunks before."""
    rank = dist.get_rank()
    chunks = [torch.tensor([value(origin)]) for origin in before[rank]]
    whole = torch.cat(chunks)
    if name == "broadcast":
        dist.broadcast(whole, src=0)
    elif name == "all-reduce":
        dist.all_reduce(whole)
    elif name == "reduce-scatter":
        mine = torch.empty(1)
        dist.reduce_scatter(mine, chunks)
        whole = torch.zeros(4)
        whole[rank] = mine
    elif name == "all-gather":
        parts = [torch.empty(1) for _ in range(4)]
        dist.all_gather(parts, chunks[rank])
        whole = torch.cat(parts)
    return whole.tolist()


def test_the_collectives_do_what_the_picture_shows():
    with Ranks(4) as ranks:
        for name, (before, expected) in pictures.COLLECTIVES.items():
            shown = [[value(origin) for origin in row] for row in expected]
            assert ranks.run(after, name, before) == shown, name


@pytest.mark.parametrize("draw", [pictures.data_parallel, pictures.collectives])
def test_it_draws(draw, monkeypatch):
    monkeypatch.setattr(pictures.figures, "show", lambda: None)
    plt.close("all")
    draw()
    assert len(plt.gcf().axes[0].patches) > 4
    plt.close("all")
