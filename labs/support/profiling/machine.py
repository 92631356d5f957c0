"""Given: the machine that a program of lab 11 runs on, one `Machine` per rank.

It provides rows, keeps checkpoints and a log, and is as slow as disks and sensors are. A step has
the same rows for any number of ranks: rank r of N has rows r, r + N, r + 2N, ….
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

ROWS = 24  # per step, over all ranks
EPOCH = 4  # steps after which the slow program's rows repeat
OFTEN = 4  # each of `SERVICES` is needed once in this many steps
SERVICES = ("unpack", "save", "log", "temperature")


@dataclass(frozen=True)
class Troubles:
    """Other events of a run, as {step: …}. Rows are numbered within their step."""

    silent: dict[int, tuple[int, ...]] = field(default_factory=dict)  # rows that do not count
    outliers: dict[int, dict[int, float]] = field(default_factory=dict)  # {row: its largest |y|}
    stops: dict[int, tuple[int, ...]] = field(default_factory=dict)  # ranks asked to stop
    turned: dict[int, int] = field(default_factory=dict)  # the rank with reversed metrics
    leader: int = 0
    hot: float = math.inf  # the first step at which the machine is too hot


class Machine:
    """The machine of one rank.

    widths: of the network's layers, from those of x to those of y; seed: of the rows; ms: {service
    of SERVICES: milliseconds per call}. calls: the number of calls of each service.
    """

    def __init__(
        self, rank: int, ranks: int, widths: tuple[int, ...], seed: int,
        ms: dict[str, float] | None = None, troubles: Troubles | None = None,
    ):
        self.rank, self.ranks, self.widths, self.seed = rank, ranks, widths, seed
        self.troubles = troubles or Troubles()
        self.leader = self.troubles.leader
        self._ms = ms or {}
        self.calls: Counter[str] = Counter()
        self.lines: list[str] = []
        self.saved: dict[int, torch.Tensor] = {}
        self.looked_at: list[int] = []

    # --- for the slow program

    def read(self, step: int) -> tuple:
        """This rank's rows of a step, packed. The rows repeat every EPOCH steps."""
        return ("packed", step % EPOCH)

    def unpack(self, packed: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """x (rows, in), y (rows, out) from a result of `read`; equal inputs give equal outputs."""
        self._takes_time("unpack")
        return self.rows(packed[1])[:2]

    def save(self, step: int, model: nn.Module) -> None:
        """Write a checkpoint. Each rank needs one after steps 3, 7, 11, … (every OFTEN-th)."""
        self._takes_time("save")
        self.saved[step] = parameters_to_vector(model.parameters()).detach()

    def log(self, *lines: str) -> None:
        """Write one or more lines. At the end the log must have each step's line, in order, even if
        the program ends with an error."""
        self._takes_time("log")
        self.lines += lines

    def temperature(self, step: int) -> float:
        """The temperature of this machine, in °C. Above 90 the program must end with a
        RuntimeError. OFTEN steps without a reading can melt it, so read it before the work of the
        OFTEN-th."""
        self._takes_time("temperature")
        self.looked_at.append(step)
        return 90.25 if step >= self.troubles.hot else 40.0 + (7 * step + self.rank) % 9

    # --- for the other two programs

    def rows(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's x (rows, in), y (rows, out) and counts (rows,) of a step, in float64. A count
        is 1, or 0 if the row does not count."""
        into, out = self.widths[0], self.widths[-1]
        drawn = torch.Generator().manual_seed(1000 * self.seed + step)
        x = torch.randn(ROWS, into, generator=drawn, dtype=torch.float64)
        y = torch.tanh(x @ torch.linspace(-1, 1, into * out, dtype=torch.float64).view(into, out))
        y += 0.1 * torch.randn(ROWS, out, generator=drawn, dtype=torch.float64)
        counts = torch.ones(ROWS, dtype=torch.float64)
        counts[list(self.troubles.silent.get(step, ()))] = 0.0
        for row, factor in self.troubles.outliers.get(step, {}).items():
            y[row] *= factor / y[row].abs().max()
        return tuple(t[self.rank :: self.ranks].clone() for t in (x, y, counts))

    def asked_to_stop(self, step: int) -> bool:
        """Whether this rank is asked to stop after the step; True on some ranks only."""
        return self.rank in {one % self.ranks for one in self.troubles.stops.get(step, ())}

    def metrics(self, step: int, errors: torch.Tensor) -> dict[str, torch.Tensor]:
        """{name: tensor of one element} for this rank's rows. errors: one per row."""
        found = {"error": errors.sum().view(1), "largest": errors.max().view(1)}
        if self.troubles.turned.get(step) == self.rank:
            found = dict(reversed(found.items()))
        return found

    def score(self, model: nn.Module) -> torch.Tensor:
        """The model's error on rows outside the training data: one element, equal on every rank."""
        with torch.no_grad():
            x = torch.linspace(-1, 1, 5 * self.widths[0], dtype=torch.float64)
            return model(x.view(5, -1)).square().mean().view(1)

    def _takes_time(self, service: str) -> None:
        self.calls[service] += 1
        if service in self._ms:
            time.sleep(1e-3 * self._ms[service])


@contextlib.contextmanager
def unwatched(model: nn.Module) -> Iterator[SimpleNamespace]:
    """A replacement for `utils.measure.divergence.Watch` that watches nothing."""
    yield SimpleNamespace(step=lambda: None)
