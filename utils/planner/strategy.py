"""Strategies for splitting and training a model, their conflicts, and many of them as arrays.

    Strategy(tp=8, pp=8, dp=24, interleave=2, global_batch=2304, recompute="full").gpus    # 1536
    Columns.of([strategy, …], model)          # one array per field, one entry per strategy

Ranks are numbered with tp fastest, then cp, then ep, then the rest of dp, then pp
(`utils.parallel.mesh`): neighbours in a node belong to one tensor-parallel group first, then to one
context-parallel group, and stages are the farthest apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from utils.choices import RECOMPUTE, ZERO
from utils.planner.machine import Machine
from utils.planner.model import Model, check_whole

# Messages that may travel while the device computes, by the names of Megatron's options.
OVERLAPS = ("overlap_tp", "overlap_pp", "overlap_grad_reduce", "overlap_param_gather")
OFFLOAD = ("none", "optimizer", "parameters")
SCHEDULES = ("1f1b", "gpipe", "zero-bubble")
# Bytes per parameter: (weights, gradients, fp32 master copy that the optimizer keeps). "bf16" is
# ZeRO's layout, that of DeepSpeed and Megatron. "mixed" is that of this workshop's trainer in bf16:
# weights and gradients in fp32, and one copy of the weights for the passes; "autocast" keeps as
# much, casts in every pass, and sums hidden states in fp32. "fp8" has the layout of bf16: only the
# inputs of a layer's matrix products are cast. "bf16-fp32-gradients" sums and sends gradients in
# fp32, like Megatron-LM's own loop with --bf16, and Llama 3 (section 3.3.2).
PRECISIONS = {
    "fp32": (4, 4, 0),
    "bf16": (2, 2, 4),
    "bf16-fp32-gradients": (2, 4, 4),
    "fp8": (2, 2, 4),
    "mixed": (6, 4, 0),
    "autocast": (6, 4, 0),
}
# Further bytes per parameter that the optimizer keeps, always fp32.
OPTIMIZERS = {"sgd": 0, "momentum": 4, "muon": 4, "adamw": 8}
# The software of a step: Megatron's fused kernels; this workshop's trainer, eager or compiled.
SOFTWARE = ("megatron", "eager", "compiled")
CONTEXT = ("ring", "ulysses", "gather")  # `utils.parallel.context.WAYS`, without importing torch
WHOLE = ("dp", "pp", "tp", "ep", "interleave", "micro_batch", "global_batch", "cp")
CHOICES = {
    "recompute": RECOMPUTE,
    "offload": OFFLOAD,
    "schedule": SCHEDULES,
    "attention": ("scores", "fused"),
    "precision": tuple(PRECISIONS),
    "zero": ZERO,
    "sequence_parallel": (False, True),
    "context": CONTEXT,
    "software": SOFTWARE,
    "fused_loss": (False, True),
    **dict.fromkeys(OVERLAPS, (False, True)),
}
OPEN = ("attention", "precision", *OVERLAPS)  # None: the model or the machine decides
Numbers = float | np.ndarray  # one, or one for each strategy


@dataclass(frozen=True)
class Strategy:
    """One way to train on dp · pp · cp · tp devices. Raises ValueError for invalid values.

    ep          experts are split over ep of the dp ranks
    interleave  chunks of layers per stage (interleaved 1F1B)
    zero        0 to 3: what the ranks of dp and cp shard (ZeRO)
    recompute   "none", "selective" (the core of the attention) or "full" (each layer)
    offload     "none", "optimizer" (its state and step are the host's), "parameters" (those too)
    attention   "scores" keeps them in memory, "fused" does not; None: fused in the gated layout,
                the machine's in the GPT layout
    precision   None: the machine decides;  global_batch None: the model's
    overlap_tp              tensor parallelism's messages travel while the adjacent products are
                            computed (Megatron's --tp-comm-overlap); only with sequence_parallel
                            and inside a node
    overlap_pp              hidden states travel while the stage works on another chunk
    overlap_grad_reduce     gradients travel during the last backward pass (--overlap-grad-reduce)
    overlap_param_gather    ZeRO's weights travel during the passes (--overlap-param-gather)
                            None: as Megatron at the machine's time (`Machine.overlaps`)
    cp          ranks that divide the positions of each sequence, and work on the same rows
    context     "ring", "ulysses" or "gather": how attention sees the others' positions, see
                `utils.parallel.context`
    software    "megatron", or this workshop's trainer, "eager" or "compiled": its loss holds some
                of the logits (with autocast all), and gradients take memory only once computed
    fused_loss  Megatron's --cross-entropy-loss-fusion: fewer passes over the logits
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    ep: int = 1
    interleave: int = 1
    micro_batch: int = 1
    global_batch: int | None = None
    recompute: str = "none"
    zero: int = 0
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    offload: str = "none"
    attention: str | None = None
    precision: str | None = None
    overlap_tp: bool | None = None
    overlap_pp: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    cp: int = 1
    context: str = "ring"
    software: str = "megatron"
    fused_loss: bool = False

    def __post_init__(self):
        for name in WHOLE:
            value = getattr(self, name)
            if value is None and name == "global_batch":
                continue
            check_whole(_flag(name), value)
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value is None and name in OPEN:
                continue
            if value not in known:
                raise ValueError(
                    f"{_flag(name)} {value!r} is not one of {', '.join(map(str, known))}"
                )

    @property
    def gpus(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def __str__(self):
        parts = [f"tp {self.tp}", f"pp {self.pp}", f"dp {self.dp}"]
        parts[1:1] = [f"cp {self.cp}, {self.context}"] if self.cp > 1 else []
        parts += [f"{name} {value}" for name, value in (("ep", self.ep), ("v", self.interleave))
                  if value > 1]
        parts += [f"micro-batch {self.micro_batch}", f"recompute {self.recompute}"]
        parts += [f"zero {self.zero}"] if self.zero else []
        parts += ["sequence parallel"] if self.sequence_parallel else []
        parts += [self.schedule] if self.schedule != "1f1b" else []
        parts += [f"offload {self.offload}"] if self.offload != "none" else []
        return " · ".join(parts)


def _flag(name: str) -> str:
    return name.replace("_", "-")


# ---- conflicts


def conflicts(c: "Columns", model: Model, machine: Machine) -> list[tuple[np.ndarray, str]]:
    """[(where, message)]: arrays of bool that are True for an impossible strategy, and the reason.

    A message is a template over the fields of `Columns`."""
    tokens_groups = c.dp * c.micro_batch
    return [
        (c.global_batch % tokens_groups != 0,
         "global-batch {global_batch} is not a multiple of dp · micro-batch = "
         "{dp} · {micro_batch}: change one of the three"),
        (model.heads % c.tp != 0,
         f"tp {{tp}} does not divide the {model.heads} heads: choose a divisor"),
        ((model.key_value_heads % c.tp != 0) & (c.tp % model.key_value_heads != 0),
         f"tp {{tp}} and {model.key_value_heads} key-value heads: one must divide the other"),
        (model.mlp_size % c.tp != 0,
         f"tp {{tp}} does not divide ffn {model.mlp_size}: choose a divisor"),
        ((c.pp * c.interleave > model.layers + 2) | (c.pp > model.layers),
         f"pp · interleave = {{pp}} · {{interleave}} is too many for {model.layers} layers: "
         "some stage would be empty"),
        ((c.interleave > 1) & (c.pp == 1),
         "interleave {interleave} needs two or more stages: pp is 1"),
        ((c.interleave > 1) & (c.micro_batches % c.pp != 0),
         "interleave {interleave} needs micro-batches in multiples of pp {pp}, "
         "but there are {micro_batches}"),
        ((c.interleave > 1) & (c.schedule != "1f1b"),
         "interleave {interleave} requires schedule 1f1b"),
        (c.sequence_parallel & (c.tp == 1),
         "sequence-parallel splits over the tensor-parallel ranks: tp is 1"),
        (c.sequence_parallel & (model.seq % c.tp != 0),
         f"sequence-parallel: tp {{tp}} does not divide seq {model.seq}"),
        ((c.precision == "fp8") & (machine.fp8_peak == 0),
         f"precision fp8: {machine.name} has no fp8"),
        ((c.zero == 3) & (c.pp > 1),
         "zero 3 gathers the weights for every micro-batch and cannot be combined with "
         "pp {pp}: use zero 1"),
        ((c.zero == 2) & (c.pp > 1),
         "zero 2 sums gradients for every micro-batch and cannot be combined with pp {pp}: "
         "use zero 1"),
        ((c.ep > 1) & (model.experts == 1),
         "ep {ep} splits experts, but the model is dense"),
        ((model.experts % c.ep != 0) | (c.dp % c.ep != 0),
         f"ep {{ep}} must divide dp {{dp}} and the {model.experts} experts"),
        (c.cp > model.seq,
         f"cp {{cp}} is more than the {model.seq} positions of a sequence"),
        ((c.cp > 1) & (c.context == "ulysses") & (c.cp > model.heads // c.tp),
         f"context ulysses divides the heads of a rank, {model.heads} / tp {{tp}}, but "
         "cp {cp} is more: choose ring or gather"),
        ((c.cp > 1) & (c.context != "ulysses") & (c.attention == "scores"),
         "context {context} merges results of fused attention, but attention scores keeps whole "
         "rows: choose attention fused"),
        ((c.offload == "parameters") & (c.pp > 1),
         "offload parameters streams the weights for every micro-batch and cannot be combined "
         "with pp {pp}"),
    ]


def valid(c: "Columns", model: Model, machine: Machine) -> np.ndarray:
    """True for strategies without conflicts."""
    bad = np.zeros(len(c.dp), dtype=bool)
    for where, _ in conflicts(c, model, machine):
        bad |= where
    return ~bad


def check(c: "Columns", model: Model, machine: Machine) -> None:
    """Raise ValueError with the first conflict of a strategy."""
    for where, message in conflicts(c, model, machine):
        found = np.flatnonzero(np.broadcast_to(where, c.dp.shape))
        if len(found):
            names = [*(field.name for field in fields(Strategy)), "micro_batches"]
            raise ValueError(message.format(**{name: getattr(c, name)[found[0]] for name in names}))


# ---- many at once


def defaults(model: Model, machine: Machine) -> dict[str, str | bool]:
    """{field: what None means} for the fields of `Strategy` that may be None."""
    return {
        "attention": "fused" if model.gated else machine.attention,
        "precision": machine.precision,
        **{name: name in machine.overlaps for name in OVERLAPS},
    }


def _or(value, instead):
    return instead if value is None else value


class Columns:
    """Strategies as arrays: the fields of `Strategy` and derived values.

    micro_batches  of one pipeline in a step;  gpus  dp · pp · cp · tp
    dp_cp          ranks that hold the same layers and sum their gradients
    """

    def __init__(self, **arrays: np.ndarray):
        self.__dict__.update(arrays)
        self.dp_cp = self.dp * self.cp
        self.gpus = self.dp_cp * self.pp * self.tp
        self.micro_batches = np.maximum(1, self.global_batch // (self.dp * self.micro_batch))

    @classmethod
    def of(cls, strategies: Sequence[Strategy], model: Model, machine: Machine) -> "Columns":
        """The arrays of a list of strategies; model and machine replace None."""
        open_to = {"global_batch": model.batch} | defaults(model, machine)
        return cls(**{
            field.name: np.array([_or(getattr(strategy, field.name), open_to.get(field.name))
                                  for strategy in strategies])
            for field in fields(Strategy)
        })

    def tokens(self, model: Model) -> np.ndarray:
        """Tokens of a micro-batch on the rank of cp that has the most."""
        return self.micro_batch * np.ceil(model.seq / self.cp)

    def take(self, index: np.ndarray) -> "Columns":
        """The strategies that `index` (a mask or positions) selects."""
        return Columns(**{f.name: getattr(self, f.name)[index] for f in fields(Strategy)})

    def as_floats(self) -> "Columns":
        """These strategies in fp64 instead of int64: exact up to 2⁵³, without overflow beyond."""
        columns = {f.name: getattr(self, f.name) for f in fields(Strategy)}
        return Columns(**{name: column.astype(float) if column.dtype.kind == "i" else column
                          for name, column in columns.items()})

    def strategies(self) -> list[Strategy]:
        """One `Strategy` for each."""
        lists = [getattr(self, field.name).tolist() for field in fields(Strategy)]
        return [Strategy(*values) for values in zip(*lists, strict=True)]

    def __len__(self):
        return len(self.dp)
