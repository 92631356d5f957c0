"""One strategy in full: its memory, the time of a step, whether it fits."""

from dataclasses import dataclass

import numpy as np

from utils.planner.machine import Machine
from utils.planner.memory import memory
from utils.planner.model import Model
from utils.planner.step import step
from utils.planner.strategy import Columns, Strategy, check

# the result of `evaluate`
Evaluated = tuple[
    dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray
]
USABLE = 0.95  # of a device's memory: driver, libraries and fragmentation take the rest


@dataclass(frozen=True)
class Plan:
    """The cost of a strategy: bytes of a rank of the fullest stage, seconds of a step.

    memory, seconds     by kind, and their "total";  host: bytes in the host's memory
    hidden              seconds of messages that travel while the device computes, not in the total
    tflops_per_gpu      model FLOPs (no recomputation) per second and device, in 10¹²
    hardware_tflops_per_gpu     with recomputation, as in Megatron's paper of 2021
    mfu                 tflops_per_gpu / peak
    """

    model: Model
    strategy: Strategy
    machine: Machine
    parameters: int
    memory: dict[str, float]
    host: float
    seconds: dict[str, float]
    hidden: dict[str, float]
    tflops_per_gpu: float
    hardware_tflops_per_gpu: float
    mfu: float
    hfu: float
    fits: bool
    tokens_per_second: float

    def as_dict(self) -> dict:
        """The plan for programs, as printed by `--json`."""
        return {
            "model": self.model.name,
            "machine": self.machine.name,
            "gpus": self.strategy.gpus,
            "strategy": {
                name: value for name, value in vars(self.strategy).items() if value is not None
            },
            "parameters": self.parameters,
            "active_parameters": self.model.active_parameters,
            "memory_bytes": {kind: round(size) for kind, size in self.memory.items()},
            "host_memory_bytes": round(self.host),
            "step_seconds": self.seconds,
            "hidden_seconds": self.hidden,
            "tflops_per_gpu": self.tflops_per_gpu,
            "hardware_tflops_per_gpu": self.hardware_tflops_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "fits": self.fits,
            "tokens_per_second": self.tokens_per_second,
        }

    def days(self, tokens: float) -> float:
        """Days of training on `tokens` tokens."""
        return tokens / self.tokens_per_second / 86400

    def __str__(self):
        memory = self.memory | ({"host memory": self.host} if self.host else {})
        unit, name = (1e9, "GB") if self.memory["total"] >= 1e9 else (1e6, "MB")
        rows = [
            f"{self.model.name or 'model'}: {counted(self.parameters)} parameters on "
            f"{self.strategy.gpus} x {self.machine.name}",
            f"{self.strategy} · batch {self.strategy.global_batch or self.model.batch}",
            "",
            f"{'memory per rank':<18}{name:>9}    {'a step':<12}{'seconds':>9}{'share':>8}",
        ]
        left = [f"{kind:<18}{size / unit:>9.2f}" for kind, size in memory.items()]
        total = self.seconds["total"]
        right = [
            f"{kind:<12}{seconds:>9.3f}{seconds / total:>8.1%}"
            for kind, seconds in self.seconds.items()
            if seconds > 0
        ]
        for index in range(max(len(left), len(right))):
            one = left[index] if index < len(left) else " " * 27
            two = right[index] if index < len(right) else ""
            rows.append(f"{one}    {two}".rstrip())
        limit = self.machine.memory * USABLE / 1e9
        rows += [
            "",
            f"fits: {'yes' if self.fits else 'no'} ({limit:.1f} GB usable), "
            f"{self.tflops_per_gpu:.4g} TFLOP/s of model FLOPs per device "
            f"({self.hardware_tflops_per_gpu:.4g} with recomputation), MFU {self.mfu:.1%}, "
            f"{self.tokens_per_second:,.0f} tokens/s",
        ]
        behind = [f"{kind} {seconds:.3f}" for kind, seconds in self.hidden.items() if seconds > 0]
        if behind:
            rows.append(f"hidden behind computation, in seconds: {' · '.join(behind)}")
        return "\n".join(rows)


def counted(parameters: int) -> str:
    """175 billion, 0.86 million."""
    unit, name = (1e9, "billion") if parameters >= 1e8 else (1e6, "million")
    return f"{parameters / unit:,.2f} {name}"


def plan(model: Model, strategy: Strategy, machine: Machine) -> Plan:
    """The cost of `strategy`. Raises ValueError, in one sentence, for incompatible sizes."""
    return plan_all(model, [strategy], machine)[0]


def plan_all(model: Model, strategies: list[Strategy], machine: Machine) -> list[Plan]:
    """The costs of many strategies at once, faster than one `plan` for each."""
    c = Columns.of(strategies, model, machine)
    check(c, model, machine)
    return plans(model, c, machine)


def evaluate(model: Model, c: Columns, machine: Machine) -> Evaluated:
    """(memory, host bytes, seconds, hidden seconds, fits): arrays of all strategies in `c`."""
    c = c.as_floats()  # some products would overflow 64-bit integers
    held, host = memory(model, c)
    seconds, hidden = step(model, c, machine)
    fits = (held["total"] <= USABLE * machine.memory) & (host <= machine.host_memory)
    return held, host, seconds, hidden, fits


def plans(
    model: Model, c: Columns, machine: Machine, evaluated: Evaluated | None = None
) -> list[Plan]:
    """A `Plan` for each strategy in `c`."""
    held, host, seconds, hidden, fits = evaluated or evaluate(model, c, machine)
    columns = (_rows(held), host.tolist(), _rows(seconds), _rows(hidden), fits.tolist())
    rows = zip(c.strategies(), *columns, strict=True)
    return [_plan(model, machine, *row) for row in rows]


def _rows(columns: dict) -> list[dict]:
    """{name: array} as a list of {name: number}."""
    names = list(columns)
    lists = [columns[name].tolist() for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]


def _plan(model, machine, strategy, held, host, seconds, hidden, fits) -> Plan:
    batch, total = strategy.global_batch, seconds["total"]
    flops = model.flops(batch)
    rate = flops / total / strategy.gpus
    again = model.recomputed_flops(strategy.recompute, batch) / total / strategy.gpus
    return Plan(
        model=model,
        strategy=strategy,
        machine=machine,
        parameters=model.parameters,
        memory=held,
        host=host,
        seconds=seconds,
        hidden=hidden,
        tflops_per_gpu=rate / 1e12,
        hardware_tflops_per_gpu=(rate + again) / 1e12,
        mfu=rate / machine.peak,
        hfu=(rate + again) / machine.peak,
        fits=fits,
        tokens_per_second=batch * model.seq / total,
    )
