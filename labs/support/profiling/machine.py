"""Given: the machine that a program of lab 11 runs on, one `Machine` per rank.

It hands out rows, keeps checkpoints and a log, and takes its time, as disks and sensors do. Rows
are the same for any number of ranks: rank r of N has the rows r, r + N, r + 2N … of a step.
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

ROWS = 24  # of all ranks, a step
EPOCH = 4  # steps after which the slow program's rows repeat
OFTEN = 4  # steps: each of `SERVICES` is needed once in this many
SERVICES = ("unpack", "save", "log", "temperature")


@dataclass(frozen=True)
class Troubles:
    """What else happens in a run: {step: …}, rows by their number in the step."""

    silent: dict[int, tuple[int, ...]] = field(default_factory=dict)  # rows that do not count
    outliers: dict[int, dict[int, float]] = field(default_factory=dict)  # {row: its factor}
    stops: dict[int, tuple[int, ...]] = field(default_factory=dict)  # ranks asked to stop
    turned: dict[int, int] = field(default_factory=dict)  # the rank whose metrics are turned round
    leader: int = 0
    hot: float = math.inf  # the step from which on the machine is too hot


class Machine:
    """What one rank runs on.

    widths: of the network, first and last are those of the rows; seed: of the rows; ms: {service:
    ms that it takes}, of SERVICES. calls: how often each service was asked.
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

    # --- the slow program's

    def read(self, step: int) -> tuple:
        """This rank's rows of a step, packed; after EPOCH steps the same rows return."""
        return ("packed", step % EPOCH)

    def unpack(self, packed: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """x (rows, in), y (rows, out) of a result of `read`; equal inputs give equal outputs."""
        self._takes_time("unpack")
        return self.rows(packed[1])[:2]

    def save(self, step: int, model: nn.Module) -> None:
        """Write a checkpoint. Needed after steps 3, 7, 11 … (every OFTEN-th), on each rank."""
        self._takes_time("save")
        self.saved[step] = parameters_to_vector(model.parameters()).detach()

    def log(self, *lines: str) -> None:
        """Write one or more lines. At the end, each step's line must be there, in order, even if
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

    # --- the other two's

    def rows(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's x (rows, in), y (rows, out) and counts (rows,) of a step, float64; counts
        are 1, and 0 for a row that does not count."""
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
        """{name: tensor of one number}, of this rank's rows. errors: of each row."""
        found = {"error": errors.sum().view(1), "largest": errors.max().view(1)}
        if self.troubles.turned.get(step) == self.rank:
            found = dict(reversed(found.items()))
        return found

    def score(self, model: nn.Module) -> torch.Tensor:
        """One number: the model's error on rows that it does not learn, on every rank the same."""
        with torch.no_grad():
            x = torch.linspace(-1, 1, 5 * self.widths[0], dtype=torch.float64)
            return model(x.view(5, -1)).square().mean().view(1)

    def _takes_time(self, service: str) -> None:
        self.calls[service] += 1
        if service in self._ms:
            time.sleep(1e-3 * self._ms[service])


@contextlib.contextmanager
def unwatched(model: nn.Module) -> Iterator[SimpleNamespace]:
    """Stands where `utils.measure.divergence.Watch` may stand, and watches nothing."""
    yield SimpleNamespace(step=lambda: None)
