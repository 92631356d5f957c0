"""Two ranks on one card equal one rank. NCCL needs a card per rank; gloo does not, and sends
tensors through host memory. This shows that the techniques are correct with CUDA tensors, kernels
and streams; it does not show their speed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.gpu.child import tried
from tests.gpu.training import SPLITS, equal, sizes_of
from utils.cli import parse_flags
from utils.ranks import Ranks
from utils.training.config import TrainConfig
from utils.training.train import train

WAYS = SPLITS | {"shard 2": "--shard 2"}
OF_EXPERTS = {"ep": "--ep 2", "ep, shard 1": "--ep 2 --shard 1"}


def one_card(rehearse: bool) -> Iterator[tuple[str, dict]]:
    for model, ways in {"": WAYS, "--experts 4": OF_EXPERTS}.items():
        words = f"{sizes_of(rehearse)} {model}".split()
        with Ranks(1, device="cpu", timeout=60) as pool:
            plain = losses(pool, words)
        with Ranks(2, device="cpu", timeout=60) as pool:  # gloo; `words` say where the tensors are
            for name, own in ways.items():
                yield name, tried(row, pool, [*words, *own.split()], plain)


def row(pool: Ranks, words: list[str], plain: pd.DataFrame) -> dict:
    figures = equal(losses(pool, words), plain, words)
    return {name: figures[name] for name in ("loss", "apart")}


def losses(pool: Ranks, words: list[str]) -> pd.DataFrame:
    return pd.DataFrame(pool.run(on_rank, words)[0])


def on_rank(words: list[str]) -> list[dict]:
    """The rows of a run of `utils.train`."""
    with by_the_host():
        return train(TrainConfig(**parse_flags(TrainConfig, words)))[1]


# ---- point-to-point messages, which gloo takes only from host memory


class Received:
    """The handle of a message that arrives in `there` and is copied to `tensor`."""

    def __init__(self, work: dist.Work, there: torch.Tensor, tensor: torch.Tensor):
        self.work, self.there, self.tensor = work, there, tensor

    def wait(self, *limit):
        self.work.wait(*limit)
        self.tensor.copy_(self.there)


class Sent(Received):
    """The handle of a message that is sent from `there`, which it keeps alive."""

    def wait(self, *limit):
        self.work.wait(*limit)


@contextmanager
def by_the_host() -> Iterator[None]:
    isend, irecv = dist.isend, dist.irecv

    def send_from_host(tensor, *where, **how):
        there = tensor.detach().cpu()
        return Sent(isend(there, *where, **how), there, tensor)

    def receive_at_host(tensor, *where, **how):
        there = torch.empty_like(tensor, device="cpu")
        return Received(irecv(there, *where, **how), there, tensor)

    ways = {
        "isend": send_from_host,
        "irecv": receive_at_host,
        "send": lambda *what, **how: send_from_host(*what, **how).wait(),
        "recv": lambda *what, **how: receive_at_host(*what, **how).wait(),
    }
    with mock.patch.multiple(dist, **ways), mock.patch.multiple(distributed_c10d, **ways):
        yield
