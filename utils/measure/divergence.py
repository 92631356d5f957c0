"""At which step, in which layer and on which rank do values first go wrong?

    with Watch(model) as watch:                  # on every rank
        for x, y in batches:
            loss(model(x), y).backward()
            watch.step()                         # before the optimizer's step
            optimizer.step(), optimizer.zero_grad()
    entries = watch.entries

    first_difference(entries, [entries0, …])     # one rank against N that split its work
    first_between([entries0, …])                 # replicas against one another, bit by bit
    first_nan([entries0, …])
    differing(model)                             # on every rank: which ranks' weights differ?

A watch records a few exact figures for each tensor that passes: the norm and the sum in fp64, the
number of NaN or infinite values, and a 64-bit hash of all its bits. That is about a hundred bytes
for a tensor of millions, small enough to keep for every step, send, write to a file and compare.
The tensors, in the order of a step: the weights it uses, each module's output, the gradient of each
output, the gradients of the parameters, the buffers.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.measure.traffic import tensors_in

PHASES = ("weight", "forward", "backward", "gradient", "buffer")
BLOCK = 2**22  # values converted at once
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Entry:
    """The record of one tensor on one rank."""

    step: int
    phase: str  # one of PHASES; backward: the gradient of a module's output
    name: str  # of the module, parameter or buffer; "" is the model itself
    call: int  # 0, 1, … where a module runs several times in a step
    shape: tuple[int, ...]
    norm: float
    sum: float
    bad: int  # values that are NaN or infinite
    bits: int  # `bits_of` the tensor
    split: bool = False  # a parameter of which the rank holds a shard, or its module's output

    @property
    def place(self) -> tuple[int, str, str, int]:
        return self.step, self.phase, self.name, self.call

    def __str__(self) -> str:
        words = {"weight": "the weight ", "gradient": "the gradient of ", "buffer": "the buffer "}
        what = words.get(self.phase, f"{self.phase} of ") + (self.name or "the model")
        return f"step {self.step}, {what}" + (f", call {self.call}" if self.call else "")


@dataclass(frozen=True)
class Difference:
    """The first entry that is wrong."""

    entry: Entry
    rank: int | None  # None: the shards of all ranks together
    why: str

    def __str__(self) -> str:
        where = "all ranks together" if self.rank is None else f"rank {self.rank}"
        return f"{self.entry}, {where}: {self.why}"


# ---- 1. the figures of a tensor


def bits_of(tensor: torch.Tensor) -> int:
    """A 64-bit hash of every bit of the tensor and its position, as a signed integer.

    The hash is the sum, modulo 2⁶⁴, of each value's bits, read as an integer, times an odd number
    that depends on its position. An odd factor has an inverse, so a single flipped bit always
    changes the sum; other changes go unnoticed about once in 2⁶⁴. The sum is computed on the
    tensor's device and is exact in any order.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    flat, total = flat.view(INTEGERS[flat.element_size()]), 0
    for start in range(0, len(flat), BLOCK):
        part = flat[start : start + BLOCK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + len(part), device=flat.device)
        total += int((part * (_mixed(place) | 1)).sum())
    return _wrapped(total)


def _wrapped(number: int) -> int:
    """The number modulo 2⁶⁴, as a signed integer."""
    return (number + 2**63) % 2**64 - 2**63


def _mixed(number):
    """The steps of SplitMix64 (Steele, Lea and Flood, 2014), in arithmetic modulo 2⁶⁴."""
    number = number * (0x9E3779B97F4A7C15 - 2**64)
    number = (number ^ (number >> 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    return (number ^ (number >> 27)) * (0x94D049BB133111EB - 2**64)


def _numbers(tensors: list[torch.Tensor]) -> dict:
    """The figures of an entry, for one tensor or for several together."""
    square = total = bad = bits = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for part in flat.split(BLOCK):
            wide = part.to(torch.float64)
            square += float(wide.square().sum())
            total += float(wide.sum())
            bad += int((~wide.isfinite()).sum())
        bits = _wrapped(3 * bits + bits_of(tensor))
    return {"norm": math.sqrt(square), "sum": total, "bad": bad, "bits": bits}


# ---- 2. watching a run


class Watch:
    """Records `entries` of a model while it trains inside `with`; `step()` ends a step.

    The model may be wrapped in DistributedDataParallel or DeepSpeed's engine; names are those of
    the model itself. phases: which ones to record. A module that runs again in the backward pass
    (activation checkpointing) has a second call.
    """

    def __init__(self, model: nn.Module, phases: Sequence[str] = PHASES):
        if unknown := set(phases) - set(PHASES):
            raise ValueError(f"phase {min(unknown)!r} is not one of {', '.join(PHASES)}")
        wrapped = isinstance(model, DistributedDataParallel)
        inner = wrapped or type(model).__name__ == "DeepSpeedEngine"
        self.model, self.phases = model.module if inner else model, phases
        self.entries: list[Entry] = []
        self._step, self._calls, self._hooks = 0, Counter(), []

    def __enter__(self) -> Watch:
        self._hooks = [self.model.register_forward_pre_hook(lambda *_: self._weights())]
        for name, module in self.model.named_modules():
            self._hooks.append(module.register_forward_hook(self._output(name)))
        return self

    def __exit__(self, *exception) -> None:
        for hook in self._hooks:
            hook.remove()

    def step(self) -> None:
        """Record the gradients and the buffers; call it after the backward pass."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self._keep("gradient", name, parameter.grad, _is_part(parameter))
        for name, buffer in self.model.named_buffers():
            self._keep("buffer", name, buffer)
        self._step += 1
        self._calls.clear()

    def _weights(self):
        if not self._calls:  # the first forward pass of the step
            for name, parameter in self.model.named_parameters():
                self._keep("weight", name, parameter, _is_part(parameter))

    def _output(self, name):
        def keep(module, inputs, output):
            split = any(_is_part(parameter) for parameter in module.parameters(recurse=False))
            tensors = [t for t in tensors_in(output) if t.is_floating_point()]
            self._keep("forward", name, tensors, split)
            for tensor in tensors[:1]:
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._keep("backward", name, grad, split))

        return keep

    def _keep(self, phase, name, tensors, split=False):
        self._calls[phase, name] += 1
        found = list(tensors_in(tensors))
        if phase not in self.phases or not found:
            return
        call, shape = self._calls[phase, name] - 1, tuple(found[0].shape)
        numbers = _numbers(found)
        self.entries.append(Entry(self._step, phase, name, call, shape, **numbers, split=split))


def _is_part(parameter) -> bool:
    """Whether this rank holds only a shard: split by utils.parallel, or a sharded DTensor."""
    placements = getattr(parameter, "placements", ())
    return hasattr(parameter, "tp_split") or any(not p.is_replicate() for p in placements)


def save(entries: Iterable[Entry], path: str | Path) -> None:
    """Write a rank's entries, one JSON object per line, to compare with another run later."""
    path = Path(path)
    beside = path.with_name(f"{path.name}.part")
    beside.write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in entries))
    beside.replace(path)


def load(path: str | Path) -> list[Entry]:
    """The entries that `save` wrote. Raises ValueError for another file."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        return [Entry(**row | {"shape": tuple(row["shape"])}) for row in rows]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} holds no entries: watch.save writes them") from None


# ---- 3. comparing


def first_difference(
    one: Sequence[Entry],
    ranks: Sequence[Sequence[Entry]],
    *,
    rtol: float = 1e-4,
    mean: bool = True,
) -> Difference | None:
    """Where N ranks first differ from one rank that does all the work; None: nowhere.

    one      the entries of the rank that does all the work
    ranks    by rank, the entries of the ranks that split it: the rows of the batch (data
             parallel) or the matrices (tensor parallel)
    rtol     how far norms may differ by rounding, relative to the norm
    mean     each rank's loss is the mean over its own rows, and gradients are averaged

    A tensor of the same shape must have the same figures on each rank. Where the ranks hold shards,
    which add up to as many values as the whole, the norm and sum of all shards together must agree.
    Other tensors are skipped, and so is a single value: it may be the loss of a rank's own rows.
    """
    if not ranks:
        raise ValueError(
            "no rank's entries are given: first_difference(one, [entries of rank 0, …])"
        )
    known = [{entry.place: entry for entry in entries} for entries in ranks]
    largest = defaultdict(float)  # values far smaller than the rest are rounding errors
    for entry in one:
        key = entry.step, entry.phase
        largest[key] = max(largest[key], 0.0 if entry.bad else entry.norm)
    for entry in one:
        least = 1e-3 * largest[entry.step, entry.phase]
        found = [entries.get(entry.place) for entries in known]
        if None in found:
            return Difference(entry, found.index(None), "it has no such entry")
        passing = entry.phase in ("forward", "backward")
        if passing and math.prod(entry.shape) == 1 and len(ranks) > 1:
            continue
        if all(other.shape == entry.shape for other in found):
            for rank, other in enumerate(found):
                if why := _apart(entry, other, rtol, least):
                    return Difference(entry, rank, why)
        elif sum(math.prod(other.shape) for other in found) == math.prod(entry.shape):
            rows = found[0].shape[1:] == entry.shape[1:]  # slices of the batch
            scale = 1 / len(found) if mean and rows and entry.phase == "backward" else 1.0
            if why := _apart(entry, _together(found, scale), rtol, least):
                return Difference(entry, None, why)
    return None


def _together(parts, scale):
    norm = math.sqrt(math.fsum(part.norm**2 for part in parts))
    total = math.fsum(part.sum for part in parts)
    bad = sum(part.bad for part in parts)
    return replace(parts[0], norm=scale * norm, sum=scale * total, bad=bad)


def _apart(expected, found, rtol, least):
    if found.bits == expected.bits and found.shape == expected.shape:
        return None
    if found.bad or expected.bad:
        if found.bad == expected.bad:
            return None
        return f"{found.bad} NaN or infinite values instead of {expected.bad}"
    room = rtol * max(expected.norm, found.norm, least)
    if abs(found.norm - expected.norm) > room:
        return f"norm {found.norm:.6g} instead of {expected.norm:.6g}"
    if abs(found.sum - expected.sum) > room * math.sqrt(math.prod(expected.shape)):
        return f"sum {found.sum:.6g} instead of {expected.sum:.6g}"
    return None


def first_between(
    ranks: Sequence[Sequence[Entry]], *, same_rows: bool = False
) -> Difference | None:
    """Where replicas first differ from one another by at least one bit; None: nowhere.

    Weights, gradients and buffers are compared, except those of which a rank holds a shard.
    same_rows: the ranks were given the same rows (tensor parallel), so outputs must be equal too.
    The rank named is one in the minority.
    """
    order = sorted(
        {entry.place: number for entries in ranks for number, entry in enumerate(entries)}.items(),
        key=lambda item: item[1],
    )
    known = [{entry.place: entry for entry in entries} for entries in ranks]
    for place, _ in order:
        found = [entries.get(place) for entries in known]
        there = next(entry for entry in found if entry)
        if place[1] in ("forward", "backward") and not same_rows:
            continue
        if None in found:
            return Difference(there, found.index(None), "it has no such entry, but the others do")
        if there.split or len({entry.shape for entry in found}) > 1:
            continue
        if odd := _odd_ones([entry.bits for entry in found]):
            own, others = found[odd[0]], found[next(r for r in range(len(found)) if r not in odd)]
            why = f"norm {own.norm:.9g}, but the others have {others.norm:.9g}"
            if own.norm == others.norm:
                why = "its bits differ from those of the others"
            return Difference(own, odd[0], why)
    return None


def _odd_ones(bits: Sequence[int]) -> list[int]:
    """The ranks in the minority; in a tie the side of the lowest rank counts as right."""
    usual = Counter(bits).most_common(1)[0][0]
    return [rank for rank, own in enumerate(bits) if own != usual]


def first_nan(ranks: Sequence[Sequence[Entry]]) -> Difference | None:
    """The first NaN or infinite value on any rank, in program order; None if there is none."""
    found = []
    for rank, entries in enumerate(ranks):
        for number, entry in enumerate(entries):
            if entry.bad:
                found.append((entry.step, number, rank, entry))
                break
    if not found:
        return None
    _, _, rank, entry = min(found, key=lambda one: one[:3])
    return Difference(entry, rank, f"{entry.bad} of {math.prod(entry.shape)} values are NaN or inf")


# ---- 4. replicas at one moment


@torch.no_grad()
def differing(model: nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, list[int]]:
    """{parameter or buffer: the ranks of `group` whose bits differ from the majority's}.

    Call it on every rank of the group, whose ranks hold replicas; with tensor parallelism that is
    the data-parallel group. {} means equal to the last bit. One all-gather of 8 bytes per tensor
    finds a bit that flipped in the memory of one rank. With two ranks there is no majority, and
    rank 1 is named. Without a group, parameters of which a rank holds a shard are left out.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    named = [(name, t) for name, t in named if group is not None or not _is_part(t)]
    if not named:
        return {}
    device = named[0][1].device
    bits = [_wrapped(sum(bits_of(part) for part in tensors_in(tensor))) for _, tensor in named]
    own = torch.tensor(bits, dtype=torch.int64, device=device)
    size = dist.get_world_size(group)
    all_bits = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(all_bits, own, group=group)
    columns = torch.stack(all_bits, dim=1).tolist()
    odd = {name: _odd_ones(bits) for (name, _), bits in zip(named, columns)}
    return {name: ranks for name, ranks in odd.items() if ranks}
