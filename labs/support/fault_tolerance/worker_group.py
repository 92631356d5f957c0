"""Given: the `Crew` that each rank of exercise b gets, and the network that it trains.

The rows of a step are numbered from 0 to `batch` - 1, and are the same on every rank.
"""

import datetime
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

HOST = "127.0.0.1"
CONNECT = datetime.timedelta(seconds=30)  # to the store, on a machine that may be busy


@dataclass(frozen=True)
class Settings:
    """The settings of a run. widths: of the network, from inputs to outputs; seed: of the initial
    weights and all rows; port: of the store; the rest is passed on to `Crew`."""

    size: int
    steps: int
    batch: int = 12
    widths: tuple[int, ...] = (6, 8, 4)
    seed: int = 0
    lr: float = 0.02
    momentum: float = 0.8
    limit: float = 0.3
    patience: float = 2.0
    port: int = 0

    def network(self) -> nn.Module:
        """The network with its initial weights, float64, the same on every rank."""
        drawn = torch.Generator().manual_seed(self.seed)
        layers = []
        for inputs, outputs in zip(self.widths, self.widths[1:]):
            layers += [nn.Linear(inputs, outputs, dtype=torch.float64), nn.Tanh()]
        model = nn.Sequential(*layers[:-1])
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=drawn, dtype=p.dtype) / p.shape[-1] ** 0.5)
        return model

    def losses(self, model: nn.Module, step: int, which: Sequence[int]) -> torch.Tensor:
        """See `Crew.losses`."""
        drawn = torch.Generator().manual_seed(1000 * self.seed + step)
        inputs, outputs = self.widths[0], self.widths[-1]
        x = torch.randn(self.batch, inputs, generator=drawn, dtype=torch.float64)
        noise = torch.randn(self.batch, outputs, generator=drawn, dtype=torch.float64)
        truth = torch.linspace(-1, 1, inputs * outputs, dtype=torch.float64).view(inputs, outputs)
        y = torch.tanh(x @ truth) + 0.1 * noise
        rows = torch.tensor(list(which), dtype=torch.long)
        return (model(x[rows]) - y[rows]).square().sum(dim=1)


class Crew:
    """The information that a rank has, and the calls that it may make.

    rank      its number, which does not change when other ranks die
    members   the numbers of all ranks at the start: [0, 1, 2 …]
    batch     rows per step, over all ranks
    lr, momentum  of the optimizer
    limit     seconds after which a collective that waits for a rank should fail
    patience  seconds that a meeting waits for missing ranks: more than six times `limit`, because a
              rank may take that long to notice a death while gloo makes its group
    """

    def __init__(self, settings: Settings, rank: int, told: Callable[..., None] = lambda *_: None):
        self.rank, self.members, self.batch = rank, list(range(settings.size)), settings.batch
        self.lr, self.momentum = settings.lr, settings.momentum
        self.limit, self.patience = settings.limit, settings.patience
        self._settings, self._told = settings, told

    def store(self) -> dist.Store:
        """Connect to a store that no rank hosts: it lasts as long as the run. Waiting for a key
        fails after `limit` seconds with a RuntimeError."""
        self._told("store")
        store = dist.TCPStore(HOST, self._settings.port, is_master=False, timeout=CONNECT)
        store.set_timeout(datetime.timedelta(seconds=self.limit))
        return store

    def losses(self, model: nn.Module, step: int, which: Sequence[int]) -> torch.Tensor:
        """The losses of these rows of a step's batch, (len(which),), float64, with a graph.

        which: row numbers, such as range(3, 6); it may be empty.
        """
        which = [int(row) for row in which]
        self._told("losses", step, which)
        return self._settings.losses(model, step, which)

    def after(self, step: int, model: nn.Module, loss: float) -> None:
        """Call this after each step that this rank has completed. loss: the mean over the batch,
        with the weights before the step."""
        self._told("after", step, model, loss)


def store_server() -> dist.TCPStore:
    """A store for the ranks of one run, at its `.port`; it ends with this object.

    It gets an IPv4 socket: TCPStore's own serves IPv6 too, sees a client as ::ffff:127.0.0.1, which
    is not in /etc/hosts, and looks that up in the DNS before serving any client.
    """
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    own = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening.detach()}
    return dist.TCPStore(HOST, port, **own)


def alone(settings: Settings) -> tuple[list[torch.Tensor], list[float]]:
    """Train on one rank with all rows: the weights after each step, 1-D, and each loss."""
    model = settings.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    weights, losses = [], []
    for step in range(settings.steps):
        loss = settings.losses(model, step, range(settings.batch)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights.append(weights_of(model))
        losses.append(loss.item())
    return weights, losses


def weights_of(model: nn.Module) -> torch.Tensor:
    """A copy of all parameters as one tensor, 1-D."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
