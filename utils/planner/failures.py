"""Failures: how often a run has one, and how long it should compute between two checkpoints.

    LLAMA_3.hours_between              3.09: all devices work together, so one failure stops all
    between = LLAMA_3.between(1024)    seconds between the failures of 1,024 such devices
    young(save, between), daly(save, between)
    stretch(interval, save, restart, between)                 expected: 1.1 takes 10 % longer
    simulate(work, interval, save, restart, uptimes(between)) the same, failure by failure

All times are in seconds. A run computes for `interval`, saves for `save`, and so on; a failure ends
its current activity, costs `restart`, and returns it to the last complete checkpoint. Failures come
at random, `between` apart on average, during any activity (exponential uptimes).

Sources: Young 1974 (CACM 17, 9: "A first order approximation to the optimum checkpoint interval");
Daly 2006 (Future Generation Computer Systems 22, 3: "A higher order estimate of the optimum
checkpoint interval for restart dumps"), whose δ, M and R are `save`, `between` and `restart`.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Failures of one long run: unplanned interruptions."""

    devices: int
    days: float
    failures: int
    source: str

    @property
    def hours_between(self) -> float:
        """Mean hours between two failures of the whole run."""
        return 24 * self.days / self.failures

    def between(self, devices: int) -> float:
        """Mean seconds between two failures of a run on `devices` of these devices."""
        return 3600 * self.hours_between * self.devices / devices


LLAMA_3_CAUSES = {  # Table 5: cause -> (component, interruptions)
    "faulty GPU": ("GPU", 148),
    "GPU memory (HBM3)": ("GPU", 72),
    "software bug": ("software", 54),
    "network switch or cable": ("network", 35),
    "host maintenance": ("host", 32),
    "GPU memory (SRAM)": ("GPU", 19),
    "GPU system processor": ("GPU", 17),
    "network card": ("host", 7),
    "NCCL watchdog time limit": ("unknown", 7),
    "silent data corruption": ("GPU", 6),
    "GPU thermal interface, sensor": ("GPU", 6),
    "SSD": ("host", 3),
    "power supply": ("host", 3),
    "server chassis": ("host", 2),
    "IO expansion board": ("host", 2),
    "dependency": ("software", 2),
    "CPU": ("host", 2),
    "system memory": ("host", 2),
}
LLAMA_3 = Published(
    16_384, 54, sum(count for _, count in LLAMA_3_CAUSES.values()),
    "Grattafiori et al. 2024, arXiv:2407.21783, Table 5",
)
OPT = Published(
    992, 60, 35 + 70,
    "Zhang et al. 2022, arXiv:2205.01068, section 2.5: in two months 35 restarts by hand, and an "
    "estimate of more than 70 automatic ones",
)


def young(save: float, between: float) -> float:
    """Seconds of computing between two checkpoints, to first order in save / between."""
    _check(save=save, between=between)
    return math.sqrt(2 * save * between)


def daly(save: float, between: float) -> float:
    """Seconds of computing between two checkpoints, by Daly's higher-order estimate."""
    _check(save=save, between=between)
    if save >= 2 * between:
        return between
    x = save / (2 * between)
    return math.sqrt(2 * save * between) * (1 + math.sqrt(x) / 3 + x / 9) - save


def stretch(interval: float, save: float, restart: float, between: float) -> float:
    """The expected time of a run over the time it computes: Daly's cost function, in which failures
    also strike while it saves and restarts."""
    _check(interval=interval, save=save, between=between)
    exponent = (interval + save) / between
    if exponent + restart / between > 700:
        return math.inf
    return between / interval * math.exp(restart / between) * math.expm1(exponent)


KINDS = ("computing", "saving", "lost", "restarting")


def uptimes(between: float, seed: int = 0) -> Iterator[float]:
    """Endless seconds from each failure to the next."""
    drawn = random.Random(seed)
    while True:
        yield drawn.expovariate(1 / between)


def spans(
    work: float, interval: float, save: float, restart: float, uptimes: Iterator[float]
) -> Iterator[tuple[str, float]]:
    """A run of `work` seconds of computing, failure by failure: (one of KINDS, seconds) in turn;
    "lost" is the computing and saving that a failure undoes."""
    _check(work=work, interval=interval, save=save)
    computed, left = 0.0, next(uptimes)  # seconds until the next failure
    while computed < work:
        part = min(interval, work - computed)
        if left >= part + save:
            computed, left = computed + part, left - part - save
            yield "computing", part
            yield "saving", save
            continue
        yield "lost", left
        while (left := next(uptimes)) < restart:
            yield "restarting", left
        yield "restarting", restart
        left -= restart


@dataclass(frozen=True)
class Course:
    """Where the seconds of a run went, by kind."""

    seconds: dict[str, float]
    failures: int

    @property
    def stretch(self) -> float:
        """The total time over the computing time."""
        return sum(self.seconds.values()) / self.seconds["computing"]


def simulate(
    work: float, interval: float, save: float, restart: float, uptimes: Iterator[float]
) -> Course:
    """The sums of a run's `spans`."""
    seconds, failures = dict.fromkeys(KINDS, 0.0), 0

    def counted():
        nonlocal failures
        for uptime in uptimes:
            yield uptime
            failures += 1

    for kind, length in spans(work, interval, save, restart, counted()):
        seconds[kind] += length
    return Course(seconds, failures)


def _check(**seconds: float) -> None:
    for name, value in seconds.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} {value!r} is not a time: give a number of seconds above 0")
