"""Published measurements, as rows: a model, a strategy, a machine, and the published figure.

    for row in HELD_OUT: row.source, row.name, row.published, row.predicted(), row.error()
    print(errors())        # the same: python -m utils.planner --errors

DENSE holds runs of Megatron's family on A100 and H100, SHARDED runs of ZeRO-3 and FSDP. The rule
for splitting them, made before anything was fitted: the rows of each source, sorted by name, go
alternately to the half that constants were fitted to and to the held-out half.

Strategies are the sources' own. Where they are incomplete:

* Narayanan et al. 2021, Table 1: micro-batch and interleaving are those of the authors' scripts
  (Megatron-LM, examples/sc21/run_table_1.sh).
* Megatron-Core: the README names the overlaps but not the micro-batches. We assume what the authors
  did in 2021: without stages, a rank's whole batch at once; with stages, one sequence; and as many
  chunks as a stage has layers (the README overlaps pipeline messages, which requires chunks). In
  its arguments.py, gradients are fp32 whenever weights are bf16.
* NeMo: the overlaps are in the recipes of its launcher (NeMo-Framework-Launcher, tag 24.07,
  launcher_scripts/conf/training), and so are the loss and Nemotron's layout. For Nemotron-340B
  they contradict the summary: its 12 chunks came with a recipe of December, which overlaps tp and
  pp; that of 24.07 has 8 and overlaps neither. We take the summary's chunks and the overlaps of
  24.07.

LONG holds runs of long sequences with context parallelism, to which no constant was fitted;
LONG_OTHER_SOFTWARE those of torchtitan. Where they are incomplete:

* NeMo (docs/source/performance/performance_long_sequence.md): one sequence per micro-batch, no
  recomputation, keys and values in a ring, all four overlaps.
* Llama 3: keys and values are gathered (section 3.3.2); chunks, overlaps and recomputation (none)
  as in its other runs.
* torchtitan (benchmarks/llama3_h100_202412_torchtitan.md, Tables 2 and 6): ZeRO-1 with stages. Its
  devices were limited to 500 W and had 2.4 TB/s of memory bandwidth.

The form of the formulas was found with all rows in sight, except those of the last two. The
constants are fitted to the first halves alone, rounded to two digits: `Machine.sustained` of A100
and H100, `fp8_sustained`, and to one digit `step.HIDDEN` and `step.HIDDEN_ONCE`. They minimize the
mean magnitude of log(1 + error), with dense rows counted twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from utils.planner.machine import MACHINES
from utils.planner.model import MODELS, Model
from utils.planner.plan import Plan, plan
from utils.planner.strategy import Strategy


@dataclass(frozen=True)
class Row:
    """One published figure. quantity: "hardware_tflops", "tflops" (per device, in 10¹² FLOP/s),
    "tokens" (per second and device) or "seconds" (per step)."""

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
            "tokens": found.tokens_per_second / self.strategy.gpus,
            "seconds": found.seconds["total"],
        }[self.quantity]

    def error(self) -> float:
        """The relative error of the speed: 0.1 means a prediction 10 % too fast."""
        ratio = self.predicted() / self.published
        return (1 / ratio if self.quantity == "seconds" else ratio) - 1


TABLE_1 = "Narayanan et al. 2021, Table 1"
TABLE_2 = "Narayanan et al. 2021, Table 2"
TABLE_5 = "Korthikanti et al. 2022, Table 5"
CORE = "Megatron-Core 0.8, README"
NEMO = "NeMo 24.07, performance summary"
LLAMA = "Llama 3, 2024, Table 4"
ZERO_3 = "Narayanan et al. 2021, ZeRO-3"  # of Table 2
FSDP = "PyTorch FSDP, 2022"
OPT = "Zhang et al. 2022"
FOUNDRY = "MosaicML llm-foundry"
MT_NLG = "Smith et al. 2022, section 3"
TITAN = "torchtitan, 2024"
NEMO_LONG = "NeMo 24.03, long sequences"
LLAMA_LONG = "Llama 3, 2024, Table 4, cp"
TITAN_LONG = "torchtitan, 2024, cp"

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
_DEEPSPEED = (  # preset, GPUs, micro-batch, batch, TFLOP/s with recomputation; DeepSpeed of 2021
    ("gpt3-175b", 384, 4, 1536, 144),
    ("gpt3-175b", 768, 2, 1536, 88),
    ("gpt3-175b", 1536, 1, 1536, 44),
    ("mt-nlg-530b", 640, 4, 2560, 138),
    ("mt-nlg-530b", 1120, 2, 2240, 98),
    ("mt-nlg-530b", 2240, 1, 2240, 48),
)


# of images/model_table.png; dp 48, 4,096 tokens
_CORE = (  # layers, hidden, heads, tp, pp, batch, TFLOP/s
    (24, 2048, 16, 1, 1, 192, 408.8),
    (30, 4096, 32, 2, 1, 192, 465.9),
    (32, 6144, 48, 4, 1, 192, 489.1),
    (48, 7168, 56, 8, 1, 192, 459.6),
    (84, 8192, 64, 8, 2, 384, 419.7),
    (92, 10240, 80, 8, 4, 768, 420.5),
    (96, 12288, 96, 8, 6, 1152, 432.8),
    (96, 16384, 128, 8, 8, 1536, 474.4),
    (112, 18432, 144, 8, 16, 3072, 459.9),
)
_NEMOTRON = {"vocab_size": 256000, "seq": 4096, "tie_embeddings": False, "positions": 0,
             "squared_relu": True}
_NEMO = (
    # name, model, GPUs, batch, micro-batch, tp, pp, interleave, tokens/s per GPU, overlaps tp, pp
    ("gpt3-5b", Model(24, 4096, 32), 64, 2048, 4, 1, 1, 1, 22521, False, False),
    ("gpt3-20b", Model(44, 6144, 48), 64, 256, 2, 2, 1, 1, 5851, True, False),
    ("gpt3-175b", MODELS["gpt3-175b"], 128, 256, 1, 4, 8, 6, 726, False, True),
    ("gpt3-175b", MODELS["gpt3-175b"], 512, 2048, 2, 4, 8, 6, 782, False, True),
    ("llama2-7b", replace(MODELS["llama-7b"], seq=4096), 8, 128, 1, 1, 1, 1, 16847, False, False),
    ("llama2-13b", MODELS["llama2-13b"], 16, 128, 1, 1, 4, 10, 8646, False, True),
    ("llama2-70b", MODELS["llama2-70b"], 64, 128, 1, 4, 4, 20, 1707, True, True),
    ("nemotron-8b", Model(32, 4096, 32, **_NEMOTRON), 64, 256, 4, 2, 1, 1, 12701, True, False),
    ("nemotron-22b", Model(40, 6144, 48, **_NEMOTRON), 64, 256, 2, 2, 4, 10, 4256, True, True),
    ("nemotron-340b", Model(96, 18432, 96, kv_heads=8, **_NEMOTRON), 128, 32, 1, 8, 8, 12, 322,
     False, False),
)
_MPT = {  # scripts/train/yamls/pretrain; one matrix for embedding and head
    "7b": Model(32, 4096, 32, 50368),
    "13b": Model(40, 5120, 40, 50368),
    "30b": Model(48, 7168, 56, 50368),
    "70b": Model(80, 8192, 64, 50368),
}
_FOUNDRY = (  # all its runs on 80 GB in bf16 with 2,048-token sequences, of 7 billion and more
    # machine, model, GPUs, micro-batch, micro-batches, recomputed, tokens/s per GPU
    ("dgx-a100", "7b", 8, 6, 2, "none", 4641),
    ("dgx-a100", "13b", 8, 2, 3, "none", 2262),
    ("dgx-a100", "30b", 8, 3, 21, "full", 916),
    ("dgx-a100", "70b", 32, 2, 16, "full", 373),
    ("dgx-a100", "70b", 64, 8, 4, "full", 410),
    ("dgx-h100", "7b", 8, 6, 1, "none", 10643),
    ("dgx-h100", "7b", 128, 6, 1, "none", 10475),
    ("dgx-h100", "7b", 256, 6, 1, "none", 10119),
    ("dgx-h100", "7b", 512, 6, 1, "none", 9670),
    ("dgx-h100", "13b", 8, 2, 1, "none", 4792),
    ("dgx-h100", "13b", 16, 2, 1, "none", 4767),
    ("dgx-h100", "13b", 32, 2, 1, "none", 4811),
    ("dgx-h100", "13b", 64, 2, 1, "none", 4800),
    ("dgx-h100", "13b", 128, 16, 1, "full", 5080),
    ("dgx-h100", "13b", 256, 16, 1, "full", 4989),
    ("dgx-h100", "13b", 512, 16, 1, "full", 4952),
    ("dgx-h100", "30b", 8, 3, 21, "full", 2002),
    ("dgx-h100", "30b", 16, 10, 3, "full", 2263),
    ("dgx-h100", "30b", 32, 14, 3, "full", 2308),
    ("dgx-h100", "30b", 128, 8, 1, "full", 2199),
    ("dgx-h100", "30b", 256, 8, 1, "full", 2148),
    ("dgx-h100", "30b", 512, 8, 1, "full", 2115),
    ("dgx-h100", "70b", 32, 2, 16, "full", 882),
    ("dgx-h100", "70b", 64, 8, 4, "full", 1039),
    ("dgx-h100", "70b", 128, 8, 1, "full", 1058),
    ("dgx-h100", "70b", 256, 8, 1, "full", 1035),
    ("dgx-h100", "70b", 512, 8, 1, "full", 1007),
)
_NEMO_LONG = (  # llama2-7b: thousands of tokens, batch, tp, dp, cp, TFLOP/s
    (32, 128, 2, 8, 2, 610),
    (64, 64, 4, 8, 2, 574),
    (128, 32, 4, 8, 4, 555),
    (256, 16, 4, 8, 8, 549),
    (512, 8, 8, 4, 16, 549),
    (1024, 4, 8, 4, 32, 536),
)
_TITAN_LONG = (  # preset, tp, pp, dp, cp, tokens, micro-batches, tokens/s per GPU
    ("llama3-8b", 1, 1, 8, 1, 32768, 1, 3890),
    ("llama3-8b", 1, 1, 4, 2, 65536, 1, 2540),
    ("llama3-8b", 1, 1, 2, 4, 131072, 1, 1071),
    ("llama3-8b", 1, 1, 1, 8, 262144, 1, 548),
    ("llama3-405b", 8, 8, 8, 1, 32768, 8, 76),
    ("llama3-405b", 8, 8, 4, 2, 65536, 8, 47),
    ("llama3-405b", 8, 8, 2, 4, 131072, 8, 31),
    ("llama3-405b", 8, 8, 1, 8, 262144, 8, 16),
)
_STREAMED = {"zero": 3, "overlap_grad_reduce": True, "overlap_param_gather": True}


def _dense():
    """Megatron-LM, Megatron-Core, NeMo, and Llama 3, which splits layers and stages like them."""
    for name, tp, pp, dp, interleave, micro, batch, tflops in _MEGATRON:
        strategy = Strategy(dp, pp, tp, 1, interleave, micro, batch, "full")
        model = MODELS[name]
        yield Row(TABLE_1, name, model, strategy, "dgx-a100", "hardware_tflops", tflops)
    for name, gpus, pp, batch, tflops in _PTD:
        strategy = Strategy(gpus // (8 * pp), pp, 8, 1, 1, 1, batch, "full")
        label = f"{name}, {gpus} GPUs"
        yield Row(TABLE_2, label, MODELS[name], strategy, "dgx-a100", "hardware_tflops", tflops)
    for name, pp, interleave, micro, batch, full, selective in _KORTHIKANTI:
        for mode, seconds in (("full", full), ("selective", selective)):
            split = mode != "full"
            strategy = Strategy(1, pp, 8, 1, interleave, micro, batch, mode, 0, split)
            label = f"{name}, {mode}"
            yield Row(TABLE_5, label, MODELS[name], strategy, "dgx-a100", "seconds", seconds)
    for layers, hidden, heads, tp, pp, batch, tflops in _CORE:
        model = Model(layers, hidden, heads, 131072, 4096, tie_embeddings=False)
        interleave, micro = (layers // pp, 1) if pp > 1 else (1, batch // 48)
        strategy = Strategy(48, pp, tp, 1, interleave, micro, batch, "none", 1, tp > 1,
                            attention="fused", precision="bf16-fp32-gradients")
        label = f"{model.parameters / 1e9:.1f} billion"
        yield Row(CORE, label, model, strategy, "dgx-h100", "tflops", tflops)
    for name, model, gpus, batch, micro, tp, pp, interleave, tokens, *overlaps in _NEMO:
        strategy = Strategy(gpus // (tp * pp), pp, tp, 1, interleave, micro, batch, "none", 1,
                            tp > 1, attention="fused", precision="fp8",
                            overlap_tp=overlaps[0], overlap_pp=overlaps[1],
                            fused_loss=name in ("nemotron-8b", "nemotron-22b"))
        yield Row(NEMO, f"{name}, {gpus} GPUs", model, strategy, "dgx-h100", "tokens", tokens)
    for gpus, tflops in ((8192, 430), (16384, 400)):  # the paper mentions no overlap of tp
        strategy = Strategy(gpus // 128, 16, 8, 1, 8, 1, 2048, "none", 1, True, overlap_tp=False,
                            precision="bf16-fp32-gradients")
        label, model = f"llama3-405b, {gpus} GPUs", MODELS["llama3-405b"]
        yield Row(LLAMA, label, model, strategy, "dgx-h100", "tflops", tflops)


def _sharded():
    """DeepSpeed's ZeRO-3, PyTorch's FSDP."""
    for name, gpus, micro, batch, tflops in _DEEPSPEED:
        strategy = Strategy(gpus, 1, 1, 1, 1, micro, batch, "full", 3)
        label = f"{name}, {gpus} GPUs"
        yield Row(ZERO_3, label, MODELS[name], strategy, "dgx-a100", "hardware_tflops", tflops)
    blog = replace(MODELS["gpt3-175b"], seq=512)
    for model, micro, tflops in ((blog, 20, 159), (MODELS["1t"], 4, 84)):
        strategy = Strategy(128, 1, 1, 1, 1, micro, 128 * micro, "full", **_STREAMED)
        yield Row(FSDP, model.name, model, strategy, "aws-p4d", "hardware_tflops", tflops)
    strategy = Strategy(124, 1, 8, 1, 1, 8, 992, "full", **_STREAMED)
    model = MODELS["opt-175b"]
    yield Row(OPT, "opt-175b", model, strategy, "dgx-a100", "hardware_tflops", 147)
    for machine, name, gpus, micro, steps, recompute, tokens in _FOUNDRY:
        strategy = Strategy(gpus, 1, 1, 1, 1, micro, gpus * micro * steps, recompute,
                            attention="fused", **_STREAMED)
        label = f"mpt-{name}, {gpus} x {machine}"
        yield Row(FOUNDRY, label, _MPT[name], strategy, machine, "tokens", tokens)


def _other_software():
    """Software that loses time in ways that this model does not include: DeepSpeed's pipeline,
    PyTorch without a compiler (on devices limited to 500 W)."""
    for servers, seconds in ((280, 60.1), (350, 50.2), (420, 44.4)):
        strategy = Strategy(8 * servers // 280, 35, 8, 1, 1, 1, 1920, "full")
        label, model = f"mt-nlg-530b, {8 * servers} GPUs", MODELS["mt-nlg-530b"]
        yield Row(MT_NLG, label, model, strategy, "dgx-a100", "seconds", seconds)
    model = MODELS["llama3-8b"]
    strategy = Strategy(8, micro_batch=2, global_batch=16, recompute="selective", zero=3)
    yield Row(TITAN, "llama3-8b, FSDP", model, strategy, "dgx-h100", "tokens", 5762)


def _long():
    """Long sequences with context parallelism, by Megatron's family and by Llama 3."""
    for thousand, batch, tp, dp, cp, tflops in _NEMO_LONG:
        model = replace(MODELS["llama-7b"], seq=1024 * thousand)
        strategy = Strategy(dp, 1, tp, 1, 1, 1, batch, "none", 1, True, precision="fp8", cp=cp)
        label = f"llama2-7b, {thousand}k tokens, cp {cp}"
        yield Row(NEMO_LONG, label, model, strategy, "dgx-h100", "tflops", tflops)
    model = replace(MODELS["llama3-405b"], seq=131072)
    strategy = Strategy(8, 16, 8, 1, 8, 1, 128, "none", 1, True, overlap_tp=False, cp=16,
                        context="gather", precision="bf16-fp32-gradients")
    label = "llama3-405b, 128k tokens, cp 16"
    yield Row(LLAMA_LONG, label, model, strategy, "dgx-h100", "tflops", 380)


def _long_other_software():
    """PyTorch's own context parallelism, on devices limited to 500 W."""
    for name, tp, pp, dp, cp, seq, micro_batches, tokens in _TITAN_LONG:
        model = replace(MODELS[name], seq=seq)
        strategy = Strategy(dp, pp, tp, 1, 1, 1, dp * micro_batches, "full", 3 if pp == 1 else 1,
                            tp > 1, precision="fp8", cp=cp)
        label = f"{name}, {seq // 1024}k tokens, cp {cp}"
        yield Row(TITAN_LONG, label, model, strategy, "dgx-h100", "tokens", tokens)


def by_source(rows: Iterable[Row]) -> dict:
    """{source: its rows}, in order."""
    rows = tuple(rows)
    return {source: [row for row in rows if row.source == source]
            for source in dict.fromkeys(row.source for row in rows)}


def halves(rows: Iterable[Row]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """(rows that constants are fitted to, held-out rows): alternate rows of each source, sorted by
    name."""
    ordered = [sorted(group, key=lambda row: row.name) for group in by_source(rows).values()]
    return tuple(tuple(row for group in ordered for row in group[first::2]) for first in (0, 1))


DENSE, SHARDED, OTHER_SOFTWARE = tuple(_dense()), tuple(_sharded()), tuple(_other_software())
FITTED, HELD_OUT = halves(DENSE)
SHARDED_FITTED, SHARDED_HELD_OUT = halves(SHARDED)
LONG, LONG_OTHER_SOFTWARE = tuple(_long()), tuple(_long_other_software())


def summary(rows: Iterable[Row]) -> tuple[float, float]:
    """(median, largest) of the errors' magnitudes."""
    sizes = [abs(row.error()) for row in rows]
    return median(sizes), max(sizes)


def errors() -> str:
    """A table of all rows, published and planned, and the errors of each half."""
    groups = (
        ("dense, Megatron's family", DENSE, HELD_OUT),
        ("ZeRO-3 and FSDP", SHARDED, SHARDED_HELD_OUT),
        ("other software", OTHER_SOFTWARE, OTHER_SOFTWARE),
        ("long sequences, cp", LONG, LONG),
        ("long sequences, other software", LONG_OTHER_SOFTWARE, LONG_OTHER_SOFTWARE),
    )
    lines = [f"{'':<36}{'published':>10}{'planned':>10}{'error':>8}"]
    for title, rows, unseen in groups:
        seen = [row for row in rows if row not in unseen]
        for source, group in by_source(rows).items():
            lines += ["", f"{source}, {group[0].quantity}"]
            for row in group:
                star = "*" if row in unseen else " "
                lines.append(f"{star} {row.name:<34}{row.published:>10,.5g}"
                             f"{row.predicted():>10,.5g}{row.error():>+8.1%}")
        lines.append("")
        for half, part in (("fitted", seen), ("not seen *", unseen)):
            if part:
                middle, worst = summary(part)
                lines.append(f"{title}, {half}: {len(part)} runs, "
                             f"median {middle:.1%}, largest {worst:.1%}")
    return "\n".join(lines)


# Dash et al. 2023 give no complete strategy, but the fraction of the peak: a GCD's, 191.5 TFLOP/s.
FRONTIER_PERCENT = {"megatron-22b": 38.38, "gpt3-175b": 36.14, "1t": 31.96}
FRONTIER_GPUS = {"megatron-22b": 64, "gpt3-175b": 1024, "1t": 3072}
