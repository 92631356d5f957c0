"""Wrong numbers: at which step, in which layer and on which rank do they begin?

    with Watch(model) as watch:                  # on every rank
        for x, y in batches:
            loss(model(x), y).backward()
            watch.step()                         # before the optimizer's step
            optimizer.step(), optimizer.zero_grad()
    entries = watch.entries

    first_difference(entries, [entries0, …])     # one rank against N that do the same work
    first_between([entries0, …])                 # replicas among each other, bit by bit
    first_nan([entries0, …])
    differing(model)                             # on every rank: whose weights are not the others'?

A watch keeps a few exact numbers of each tensor that passes: the norm and the sum in fp64, how
many values are NaN or infinite, and 64 bits of all its bits. That is a hundred bytes where the
tensor has millions, so that it can be kept for each step, sent, written to a file and compared.
What passes, in the order of a step: the weights that it uses, each module's output, the gradient of
each output, the gradients of the parameters, the buffers.
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
BLOCK = 2**22  # values that are converted at once
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Entry:
    """What is kept of one tensor on one rank."""

    step: int
    phase: str  # one of PHASES; backward: the gradient of a module's output
    name: str  # of the module, parameter or buffer; "" is the model itself
    call: int  # 0, 1, … where a module runs several times in a step
    shape: tuple[int, ...]
    norm: float
    sum: float
    bad: int  # values that are NaN or infinite
    bits: int  # `bits_of` the tensor
    split: bool = False  # of a parameter of which the rank holds a part, or its module's output

    @property
    def place(self) -> tuple[int, str, str, int]:
        return self.step, self.phase, self.name, self.call

    def __str__(self) -> str:
        words = {"weight": "the weight ", "gradient": "the gradient of ", "buffer": "the buffer "}
        what = words.get(self.phase, f"{self.phase} of ") + (self.name or "the model")
        return f"step {self.step}, {what}" + (f", call {self.call}" if self.call else "")


@dataclass(frozen=True)
class Difference:
    """The first entry that is not as it should be."""

    entry: Entry
    rank: int | None  # None: the parts of all ranks together
    why: str

    def __str__(self) -> str:
        where = "all ranks together" if self.rank is None else f"rank {self.rank}"
        return f"{self.entry}, {where}: {self.why}"


# ---- 1. the numbers of a tensor


def bits_of(tensor: torch.Tensor) -> int:
    """64 bits that depend on every bit of the tensor and on its place; a signed integer.

    Each value's bits, as an integer, times an odd number that its place decides, added up modulo
    2⁶⁴. An odd factor has an inverse: a single flipped bit always changes the sum. Other changes
    go unseen once in 2⁶⁴ or so. It is computed on the tensor's device, in any order: exact.
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
    """Modulo 2⁶⁴, as a signed integer."""
    return (number + 2**63) % 2**64 - 2**63


def _mixed(number):
    """The steps of SplitMix64 (Steele, Lea and Flood, 2014), in arithmetic modulo 2⁶⁴."""
    number = number * (0x9E3779B97F4A7C15 - 2**64)
    number = (number ^ (number >> 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    return (number ^ (number >> 27)) * (0x94D049BB133111EB - 2**64)


def _numbers(tensors: list[torch.Tensor]) -> dict:
    """The numbers of an entry, of one tensor or of several together."""
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
    """Keeps `entries` of a model while it trains inside `with`; `step()` ends a step.

    DistributedDataParallel and DeepSpeed's engine may stand around the model: names are those of
    the model itself. phases: which to keep. A module that runs again in the backward pass
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
        """The backward pass is over: keeps the parameters' gradients and the buffers."""
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
    """Whether a rank holds a part of a parameter: split by utils.parallel, or a DTensor's shard."""
    placements = getattr(parameter, "placements", ())
    return hasattr(parameter, "tp_split") or any(not p.is_replicate() for p in placements)


def save(entries: Iterable[Entry], path: str | Path) -> None:
    """Writes the entries of a rank, one JSON object a line, for a run that is compared later."""
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
    """Where N ranks first compute something else than one rank does; None: nowhere.

    one      the entries of the rank that does all
    ranks    by rank, the entries of those that share the work: the rows of the batch (data
             parallel) or the matrices (tensor parallel)
    rtol     how far norms may be apart by rounding, as a share of the norm
    mean     each rank's loss is the mean over its own rows, and gradients are averaged

    A tensor of the same shape must have the same numbers on each rank. Where the ranks hold parts,
    which have as many values as the whole, norm and sum of all parts together must agree. What fits
    neither is passed over, as is a single number: it may be a loss of a rank's own rows.
    """
    if not ranks:
        raise ValueError(
            "no rank's entries are given: first_difference(one, [entries of rank 0, …])"
        )
    known = [{entry.place: entry for entry in entries} for entries in ranks]
    largest = defaultdict(float)  # what is tiny beside the others is rounding
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
            rows = found[0].shape[1:] == entry.shape[1:]  # parts of the batch
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
        return f"{found.bad} NaN or infinite values in place of {expected.bad}"
    room = rtol * max(expected.norm, found.norm, least)
    if abs(found.norm - expected.norm) > room:
        return f"norm {found.norm:.6g} in place of {expected.norm:.6g}"
    if abs(found.sum - expected.sum) > room * math.sqrt(math.prod(expected.shape)):
        return f"sum {found.sum:.6g} in place of {expected.sum:.6g}"
    return None


def first_between(
    ranks: Sequence[Sequence[Entry]], *, same_rows: bool = False
) -> Difference | None:
    """Where replicas first differ from one another, by a single bit; None: nowhere.

    Weights, gradients and buffers are looked at, without those of which a rank holds a part.
    same_rows: the ranks were given the same rows (tensor parallel), so that outputs must be equal,
    too. The rank named is one that is not with the most.
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
            return Difference(there, found.index(None), "it has no such entry, the others do")
        if there.split or len({entry.shape for entry in found}) > 1:
            continue
        if odd := _odd_ones([entry.bits for entry in found]):
            own, others = found[odd[0]], found[next(r for r in range(len(found)) if r not in odd)]
            why = f"norm {own.norm:.9g}, the others have {others.norm:.9g}"
            if own.norm == others.norm:
                why = "its bits are not those of the others"
            return Difference(own, odd[0], why)
    return None


def _odd_ones(bits: Sequence[int]) -> list[int]:
    """Who is not with the most; of two equal parties the first is taken for right."""
    usual = Counter(bits).most_common(1)[0][0]
    return [rank for rank, own in enumerate(bits) if own != usual]


def first_nan(ranks: Sequence[Sequence[Entry]]) -> Difference | None:
    """The first NaN or infinite value of all ranks, in the order of their program; or None."""
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


# ---- 4. replicas of one moment


@torch.no_grad()
def differing(model: nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, list[int]]:
    """{parameter or buffer: the ranks of `group` whose bits are not those of the most}; on every
    rank of the group, which hold replicas: with tensor parallelism the data-parallel group.

    {} means equal to the last bit. One all-gather of 8 bytes for each tensor finds a bit that
    flipped in the memory of one rank. With two ranks nobody knows which is right: rank 1 is named.
    Without a group, parameters of which a rank holds a part are left out.
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
