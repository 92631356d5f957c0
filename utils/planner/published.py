"""What others measured, as rows: a model, a strategy, a machine, and the published figure.

    for row in FITTED: row.source, row.name, row.published, row.predicted(), row.error()

Strategies are the sources' own. Where Table 1 leaves micro-batch and interleaving open, they are
those of the authors' scripts (Megatron-LM, examples/sc21/run_table_1.sh).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from utils.planner.machine import MACHINES
from utils.planner.model import MODELS, Model
from utils.planner.plan import Plan, plan
from utils.planner.strategy import Strategy


@dataclass(frozen=True)
class Row:
    """One published figure. quantity: "hardware_tflops", "tflops" (a device, in 10¹² FLOP/s) or
    "seconds" (of a step)."""

    source: str
    name: str
    model: Model
    strategy: Strategy
    machine: str
    quantity: str
    published: float

    def plan(self) -> Plan:
        return plan(self.model, self.strategy, MACHINES[self.machine])

    def predicted(self) -> float:
        found = self.plan()
        return {
            "hardware_tflops": found.hardware_tflops_per_gpu,
            "tflops": found.tflops_per_gpu,
            "seconds": found.seconds["total"],
        }[self.quantity]

    def error(self) -> float:
        """Of the speed, relative: 0.1 is a prediction that is 10 % too fast."""
        ratio = self.predicted() / self.published
        return (1 / ratio if self.quantity == "seconds" else ratio) - 1


TABLE_1 = "Narayanan et al. 2021, Table 1"
TABLE_2 = "Narayanan et al. 2021, Table 2"
TABLE_5 = "Korthikanti et al. 2022, Table 5"
MT_NLG = "Smith et al. 2022, section 3"
LLAMA = "Llama 3, 2024, Table 4"
FSDP = "PyTorch FSDP, 2022"
OPT = "Zhang et al. 2022"
TITAN = "torchtitan, 2024"

_MEGATRON = (  # preset, tp, pp, dp, interleave, micro-batch, batch, TFLOP/s with recomputation
    ("megatron-1.7b", 1, 1, 32, 1, 16, 512, 137),
    ("megatron-3.6b", 2, 1, 32, 1, 16, 512, 138),
    ("megatron-7.5b", 4, 1, 32, 1, 16, 512, 142),
    ("megatron-18b", 8, 1, 32, 1, 8, 1024, 135),
    ("megatron-39b", 8, 2, 32, 1, 4, 1536, 138),
    ("megatron-76b", 8, 4, 32, 3, 2, 1792, 140),
    ("megatron-145b", 8, 8, 24, 2, 2, 2304, 148),
    ("megatron-310b", 8, 16, 15, 2, 1, 2160, 155),
    ("mt-nlg-530b", 8, 35, 9, 3, 1, 2520, 163),
    ("1t", 8, 64, 6, 1, 1, 3072, 163),
)
_KORTHIKANTI = (  # preset, pp, interleave, micro-batch, batch, seconds: full, selective with SP
    ("megatron-22b", 1, 1, 4, 4, 1.42, 1.10),
    ("gpt3-175b", 8, 3, 1, 64, 18.13, 13.75),
    ("mt-nlg-530b", 35, 3, 1, 280, 49.05, 37.83),
    ("1t", 64, 1, 1, 512, 94.42, 71.49),
)
_PTD = (  # preset, GPUs, pp, batch, TFLOP/s with recomputation; tp 8, micro-batch 1
    ("gpt3-175b", 384, 12, 1536, 153),
    ("gpt3-175b", 768, 12, 1536, 149),
    ("gpt3-175b", 1536, 12, 1536, 141),
    ("mt-nlg-530b", 560, 35, 2240, 171),
    ("mt-nlg-530b", 1120, 35, 2240, 167),
    ("mt-nlg-530b", 2240, 35, 2240, 159),
)
_ZERO_3 = (  # preset, GPUs, micro-batch, batch, TFLOP/s with recomputation; DeepSpeed of 2021
    ("gpt3-175b", 384, 4, 1536, 144),
    ("gpt3-175b", 768, 2, 1536, 88),
    ("gpt3-175b", 1536, 1, 1536, 44),
    ("mt-nlg-530b", 640, 4, 2560, 138),
    ("mt-nlg-530b", 1120, 2, 2240, 98),
    ("mt-nlg-530b", 2240, 1, 2240, 48),
)


def _fitted():
    """Rows that were in sight when `sustained` of each machine and `step.HIDDEN` were chosen."""
    for name, tp, pp, dp, interleave, micro, batch, tflops in _MEGATRON:
        strategy = Strategy(dp, pp, tp, 1, interleave, micro, batch, "full")
        model = MODELS[name]
        yield Row(TABLE_1, name, model, strategy, "dgx-a100", "hardware_tflops", tflops)
    for name, pp, interleave, micro, batch, full, selective in _KORTHIKANTI:
        for mode, seconds in (("full", full), ("selective", selective)):
            split = mode != "full"
            strategy = Strategy(1, pp, 8, 1, interleave, micro, batch, mode, 0, split)
            label = f"{name}, {mode}"
            yield Row(TABLE_5, label, MODELS[name], strategy, "dgx-a100", "seconds", seconds)
    for gpus, tflops in ((8192, 430), (16384, 400)):
        strategy = Strategy(gpus // 128, 16, 8, 1, 8, 1, 2048, "none", 1, True)
        label, model = f"llama3-405b, {gpus} GPUs", MODELS["llama3-405b"]
        yield Row(LLAMA, label, model, strategy, "dgx-h100", "tflops", tflops)


def _held_out():
    """Rows that nothing was chosen by: the same software and machine, other splits."""
    for name, gpus, pp, batch, tflops in _PTD:
        strategy = Strategy(gpus // (8 * pp), pp, 8, 1, 1, 1, batch, "full")
        label = f"{name}, {gpus} GPUs"
        yield Row(TABLE_2, label, MODELS[name], strategy, "dgx-a100", "hardware_tflops", tflops)


def _other_software():
    """Rows of other software, which mostly loses time in ways that this model does not know."""
    for servers, seconds in ((280, 60.1), (350, 50.2), (420, 44.4)):
        strategy = Strategy(8 * servers // 280, 35, 8, 1, 1, 1, 1920, "full")
        label, model = f"mt-nlg-530b, {8 * servers} GPUs", MODELS["mt-nlg-530b"]
        yield Row(MT_NLG, label, model, strategy, "dgx-a100", "seconds", seconds)
    blog = replace(MODELS["gpt3-175b"], seq=512)
    for model, micro, tflops in ((blog, 20, 159), (MODELS["1t"], 4, 84)):
        strategy = Strategy(128, 1, 1, 1, 1, micro, 128 * micro, "full", 3)
        label = f"{model.name}, FSDP"
        yield Row(FSDP, label, model, strategy, "aws-p4d", "hardware_tflops", tflops)
    strategy = Strategy(124, 1, 8, 1, 1, 8, 992, "full", 3)
    yield Row(
        OPT, "opt-175b, FSDP", MODELS["opt-175b"], strategy, "dgx-a100", "hardware_tflops", 147
    )
    model = MODELS["llama3-8b"]
    strategy = Strategy(8, micro_batch=1, global_batch=8, recompute="selective", zero=3)
    yield Row(TITAN, "llama3-8b, FSDP", model, strategy, "dgx-h100", "seconds", 8192 / 5762)
    for name, gpus, micro, batch, tflops in _ZERO_3:
        strategy = Strategy(gpus, 1, 1, 1, 1, micro, batch, "full", 3)
        label = f"{name}, {gpus} GPUs, ZeRO-3"
        yield Row(TABLE_2, label, MODELS[name], strategy, "dgx-a100", "hardware_tflops", tflops)


def by_source(rows: Iterable[Row]) -> dict:
    """{source: its rows}, in order."""
    return {source: [row for row in rows if row.source == source]
            for source in dict.fromkeys(row.source for row in rows)}  # fmt: skip


FITTED, HELD_OUT, OTHER_SOFTWARE = tuple(_fitted()), tuple(_held_out()), tuple(_other_software())

# Dash et al. 2023 give no complete strategy, but the share of the peak: of a GCD, 191.5 TFLOP/s.
FRONTIER_PERCENT = {"megatron-22b": 38.38, "gpt3-175b": 36.14, "1t": 31.96}
FRONTIER_GPUS = {"megatron-22b": 64, "gpt3-175b": 1024, "1t": 3072}
