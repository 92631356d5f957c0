"""Given: what exercises 06a to 06e ask for, and how their check cells judge it."""

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from utils.course.assertions import (
    PARALLEL,
    Wrong,
    alike,
    bitwise_equal,
    close,
    communication,
    nothing_kept,
    same_bits,
    told,
    unchanged,
)
from utils.course.contract import largest
from utils.course.observe import Look
from utils.course.runner import Group, Trial, fractions
from utils.measure.traffic import tensors_in
from utils.models.gpt import MLP, Attention, GPTConfig, RMSNorm, rotary_tables
from utils.shares import shares

TYPES = (torch.float64, torch.float32, torch.bfloat16)
IGNORED = -100


def exercise(looks_at: Callable[[Trial, Group], None], says: str) -> Callable[[Trial], str]:
    """The check of an exercise: what it looks at on ranks, and says of an answer that is right."""

    def judge(trial: Trial) -> str:
        trial.forbid(PARALLEL)
        for group in trial.groups(hang="Does every rank call the same collectives, in one order?"):
            looks_at(trial, group)
        return says

    return judge


def sends(where: str, look: Look, right: dict[str, int], hint: str = "") -> None:
    """Each of these operations once, of so many bytes at most; one rank need not speak to itself"""
    events = look.events
    if dist.get_world_size() == 1 and not events:
        return
    once = sorted(event.op for event in events) == sorted(right)
    if not once or any(event.payload > right[event.op] for event in events):
        communication(where, events, {op: [most] for op, most in right.items()}, hint)


def part_of(tensor: torch.Tensor, cut: tuple[int, Sequence[int]] | None) -> torch.Tensor:
    """This rank's part; cut: (dimension, length on each rank), None where all have it whole."""
    return tensor if cut is None else tensor.split(list(cut[1]), dim=cut[0])[dist.get_rank()]


# ---- a and e · functions of autograd: what happens to the tensors of all ranks, in each half

WAYS = {
    "copy_to_region": ("nothing", "sum"),
    "reduce_from_region": ("sum", "nothing"),
    "gather_to_region": ("gather", "scatter"),
    "reduce_scatter_from_region": ("scatter", "gather"),
}
RIGHT = {  # of all ranks' tensors, and how many positions each rank has
    "nothing": lambda given, lengths: given[dist.get_rank()],
    "sum": lambda given, lengths: sum(x.double() for x in given),
    "gather": lambda given, lengths: torch.cat(given, dim=1),
    "scatter": lambda given, lengths: part_of(sum(x.double() for x in given), (1, lengths)),
}
SUMS = [  # of (got, right, own, ranks)
    (lambda s: alike(s[0], s[2]),
     "It is this rank's own. All ranks take part: their numbers add up."),
    (lambda s: alike(s[0], s[1] / s[3]),
     "It is the mean over the ranks. Every rank counts in full: a sum."),
    (lambda s: True, "It must be the sum over the ranks. Is the result there before it is used?"),
]
HINTS = {
    "nothing": "f hands x on, which is the same on all ranks. g hands the gradient on: every rank "
    "has the\nsame loss of the same sum, which grows by what x grows by.",
    "gather": "All positions, in the order of the ranks, nothing filled up between.",
}


@dataclass(frozen=True)
class Call:
    """A call of a function, with x of shape (B, T, C) forward and dy backward, or positions of
    them. odd: what the last rank has; transposed: on every other rank."""

    function: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    seed: int
    odd: str
    transposed: bool

    def tensors(self, half: int) -> list[torch.Tensor]:
        """x (half 0) or dy (half 1) of all ranks."""
        (b, t, c), size, found = self.shape, dist.get_world_size(), []
        gathers = WAYS[self.function][half] == "gather"
        for rank, n in enumerate(shares(t, size) if gathers else (t,) * size):
            seed = self.seed + 10 * half + rank
            x = fractions(seed, b, n, c, dtype=self.dtype)
            if self.transposed and rank % 2 == 0:
                x = fractions(seed, c, n, b, dtype=self.dtype).permute(2, 1, 0)
            if rank == size - 1 and self.odd == "zeros":
                x = torch.zeros_like(x)
            elif rank == size - 1 and self.odd and x.numel():
                x[0, 0, 0] = torch.nan
            found.append(x)
        return found

    def right_half(self, half: int, got: torch.Tensor, look: Look) -> None:
        """Judges the forward pass (half 0) or the backward pass (half 1)."""
        (b, t, c), size, given = self.shape, dist.get_world_size(), self.tensors(half)
        where, way = f"{self}, {('forward', 'backward')[half]}", WAYS[self.function][half]
        unchanged(where, look.changed(), "Others may hold it too: all-reduce a clone.")
        right, own = RIGHT[way](given, shares(t, size)), given[dist.get_rank()]
        own = part_of(own, (1, shares(t, size))) if way == "scatter" else own
        hint = HINTS.get(way) or told(SUMS, (got, right, own, size))
        close(where, "the result", got, right, hint=hint, dtype=self.dtype,
              slack=8 * (way != "nothing"), scale=largest(given))
        piece, value = -(-t // size), b * c * self.dtype.itemsize
        most = {
            "nothing": {}, "sum": {"all_reduce": t * value},
            "gather": {"all_gather": piece * value},
            "scatter": {"reduce_scatter": piece * size * value},
        }
        hint = "Pieces are filled up to the longest of the ranks, and no further."
        sends(where, look, most[way], hint)
        if way == "nothing" and look.largest:
            raise Wrong(
                f"{where}: a tensor of {look.largest:,} bytes is made. It has nothing to compute: "
                "can it hand on\nwhat it was given?"
            )

    def __str__(self) -> str:
        odd = f", {self.odd} on the last rank" if self.odd else ""
        layout = ", transposed on every other rank" * self.transposed
        return f"{self.function} of {self.shape} in {self.dtype}{layout}{odd}"


def applies(answer: Any, calls: list[Call]) -> None:
    """On a rank: all calls forward, and then all back; raises Wrong."""
    running = []
    with Look() as always:
        for call in calls:
            more = (call.shape[1],) if call.function == "gather_to_region" else ()
            x, dy = (call.tensors(half)[dist.get_rank()] for half in (0, 1))
            with Look(x=x.requires_grad_()) as look:
                y = getattr(answer, call.function)(x, *more)
            call.right_half(0, y.detach(), look)
            node = y.grad_fn
            saved = [*getattr(node, "saved_tensors", ()), *getattr(node, "__dict__", {}).values()]
            if any(tensor.numel() > 8 for tensor in tensors_in(saved)):  # lengths may be tensors
                raise Wrong(f"{call}: tensors are kept for the backward pass. What for?")
            running.append((call, x, dy, y))
        for call, x, dy, y in reversed(running):
            with Look(dy=dy) as look:
                (dx,) = torch.autograd.grad(y, x, dy)
            call.right_half(1, dx, look)
        del x, dy, y, dx, node, saved, look
        running.clear()
    nothing_kept("these calls", always.kept())


def right_functions(trial: Trial, group: Group, functions: Sequence[str]) -> None:
    """Judges three calls of each: in the second some rank has no position. On 2 ranks also where
    results come late."""
    draw, size, calls = trial.draw, group.size, []
    for i, odd in enumerate(("", "zeros", "one NaN")):
        for function in functions:
            t = draw.randrange(1, size) if i == 1 and size > 1 else draw.randrange(1, 4 * size)
            shape, dtype = (draw.randrange(2, 19), t, draw.randrange(2, 9)), TYPES[(i + size) % 3]
            calls.append(Call(function, shape, dtype, trial.new_seed(), odd, i == 0))
    for late in (False, True) if size == 2 else (False,):
        where = group.case("some tensors" + ", results coming late" * late)
        group.run(where, applies, calls, late=late)


# ---- b, c and e · layers


class NormedMLP(MLP):
    """The MLP with the norm before it and the residual around it."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(self.norm(x))


WHOLE = {"ParallelMLP": MLP, "ParallelAttention": Attention, "SequenceMLP": NormedMLP}


@dataclass(frozen=True)
class Layer:
    """A layer of the answer, and the shapes (B, T) of batches: the gradients of the first two add
    up, and the weights change after the second and the third."""

    name: str
    config: GPTConfig
    dtype: torch.dtype
    seed: int
    shapes: Sequence[tuple[int, int]]
    late: bool = False

    @property
    def sequence(self) -> bool:
        return self.name == "SequenceMLP"

    def whole(self) -> nn.Module:
        """The whole layer, the same wherever it is made."""
        layer = WHOLE[self.name](self.config)
        for i, parameter in enumerate(layer.parameters()):
            numbers = fractions(self.seed + i, *parameter.shape) / parameter.shape[-1] ** 0.5
            parameter.data = numbers.to(self.dtype)
        return layer

    def built(self, answer: Any, whole: nn.Module) -> tuple[nn.Module, dict[str, nn.Parameter]]:
        """The answer's layer, and its parameters by name."""
        given = (whole.norm, whole) if self.sequence else (whole,)
        layer = getattr(answer, self.name)(*given)
        return layer, {name: layer.get_parameter(name) for name in self.cuts}

    @property
    def cuts(self) -> dict[str, tuple[int, Sequence[int]] | None]:
        """{parameter: how it is cut}, as for `part_of`; the row layer's bias is first."""
        config, size = self.config, dist.get_world_size()
        if self.name == "ParallelAttention":
            keys = [n * config.head_size for n in shares(config.key_value_heads, size)]
            lengths = [n * config.heads // config.key_value_heads for n in keys]
            columns, row = {"q_proj": lengths, "k_proj": keys, "v_proj": keys}, "o_proj"
        else:
            lengths = shares(config.mlp_size, size)
            columns, row = {"gate_proj": lengths, "up_proj": lengths}, "down_proj"
        found = {f"{row}.bias": None, f"{row}.weight": (1, lengths)}
        for matrix, lengths in columns.items():
            found |= {f"{matrix}.weight": (0, lengths), f"{matrix}.bias": (0, lengths)}
        return found | ({"norm.weight": None} if self.sequence else {})

    def inputs(self, number: int) -> tuple[torch.Tensor, torch.Tensor, tuple]:
        """x and dy of the whole layer, (B, T, C), and what else it is called with."""
        (b, t), c, seed = self.shapes[number], self.config.hidden_size, self.seed + 100 * number
        x = fractions(seed + 50, b, t, c, dtype=self.dtype)
        dy = fractions(seed + 51, t, b, c, dtype=self.dtype).transpose(0, 1)
        if self.name != "ParallelAttention":
            return x, dy, ()
        cos, sin = rotary_tables(self.config, torch.arange(t) + seed % 50, self.dtype)
        return x, dy, (cos[:, None], sin[:, None])

    def most_saved(self, number: int) -> int:
        """Bytes that SequenceMLP may keep for the backward pass: all positions once, four times its
        own columns, and up to three times its own positions (a norm may be written in several
        ways), of bf16 in fp32."""
        (b, t), hidden, value = self.shapes[number], self.config.hidden_size, self.dtype.itemsize
        size, rank = dist.get_world_size(), dist.get_rank()
        own, columns = shares(t, size)[rank], shares(self.config.mlp_size, size)[rank]
        numbers = t * hidden + 4 * t * columns
        return b * (numbers * value + own * (3 * hidden + 2) * max(4, value))

    def __str__(self) -> str:
        config = self.config
        words = f"{config.mlp_size} columns"
        if self.name == "ParallelAttention":
            words = f"{config.heads} query and {config.kv_heads} key-value heads"
        return f"{words} in {self.dtype}" + ", results coming late" * self.late


def layers(trial: Trial, name: str, size: int) -> list[Layer]:
    """On 2 ranks one of each type, and one with results that come late; else one. On 3 ranks an MLP
    has 2 columns, so that a rank has none. The second batch has rows of one position, which attends
    to itself."""
    draw, found = trial.draw, []
    for dtype in TYPES if size == 2 else draw.sample(TYPES, 1):  # the coarse one is last
        hidden, sizes = draw.randrange(5, 30), {"heads": 1, "head_dim": 2}
        if name == "ParallelAttention":
            keys, group = size + draw.randrange(3), draw.randrange(1, 5)
            sizes = {"heads": keys * group, "kv_heads": keys, "head_dim": draw.choice((2, 4, 6))}
            hidden = keys * group * draw.randrange(1, 4)
        config = GPTConfig(
            vocab_size=2, layers=1, attention_bias=True, mlp_bias=True, hidden_size=hidden,
            intermediate_size=2 if size == 3 else draw.randrange(4, 40), **sizes,
        )
        shapes = [(draw.randrange(1, 4), draw.randrange(2, 14)) for _ in range(3)]
        shapes[1] = draw.randrange(9, 13), 1
        found.append(Layer(name, config, dtype, trial.new_seed(), shapes))
    return found + [replace(found[0], late=True)] * (size == 2)


def right_part(name: str, got: torch.Tensor, right: torch.Tensor) -> None:
    """This rank's part of a parameter, in memory of its own."""
    if not bitwise_equal(got, right):
        raise Wrong(
            f"{name} of shape {tuple(got.shape)} in {got.dtype} is not this rank's part, "
            f"{tuple(right.shape)}\nin {right.dtype} (outputs, inputs), to the bit. A column layer "
            "is cut along its outputs, a row layer along\nits inputs: where does this rank's part "
            "begin?"
        )
    stored, own = got.untyped_storage().nbytes(), got.numel() * got.element_size()
    if stored > own:
        raise Wrong(
            f"{name} is a view: it keeps {stored:,} bytes alive, of which {own:,} are its own.\n"
            "Nothing is saved so: .clone() the part."
        )


def cuts_linear(answer: Any, function: str, lengths: list[int], dtype: torch.dtype) -> None:
    """On a rank: column or row, at lengths that no rule makes."""
    dim = ("column", "row").index(function)
    linear = nn.Linear(*((sum(lengths), 5) if dim else (5, sum(lengths))), dtype=dtype)
    before = [x.detach().clone() for x in (linear.weight, linear.bias)]
    layer, cut = getattr(answer, function)(linear, tuple(lengths)), (dim, lengths)
    right_part("weight", layer.weight, part_of(before[0], cut))
    right_part("bias", layer.bias, part_of(before[1], None if dim else cut))
    same = all(map(bitwise_equal, (linear.weight, linear.bias), before))
    unchanged(function, [] if same else ["the whole layer"])


def splits(answer: Any, layer: Layer) -> None:
    """On a rank: its parts of the layer, and nothing else stays in memory."""
    whole = layer.whole()
    before = {name: p.detach().clone() for name, p in whole.named_parameters()}
    storages = [weakref.ref(p.untyped_storage()) for p in whole.parameters()]
    with Look() as look:
        mine, parts = layer.built(answer, whole)
    for name, cut in layer.cuts.items():
        right_part(name, parts[name], part_of(before[name], cut))
    same = {name: bitwise_equal(p, before[name]) for name, p in whole.named_parameters()}
    unchanged(layer.name, [name for name in same if not same[name]])
    ours = {id(p.untyped_storage()) for p in mine.parameters()}
    del whole
    gc.collect()
    alive = [storage for one in storages if (storage := one()) is not None]
    held = sum(storage.nbytes() for storage in alive if id(storage) not in ours)
    held += look.kept(list(parts.values()))
    if held:
        raise Wrong(
            f"{held:,} bytes beside the parts stay in memory when the whole layer is no longer "
            "needed.\nWho still holds it, or a copy?"
        )


def trains(answer: Any, layer: Layer) -> None:
    """On a rank: passes of the layer beside the whole one in float64, and steps of SGD of both;
    raises Wrong."""
    (mine, parts), whole = layer.built(answer, layer.whole()), layer.whole().double()
    with Look() as always:
        for number in range(len(layer.shapes)):
            one_pass(answer, layer, number, mine, parts, whole)
            for parameter in (*mine.parameters(), *whole.parameters()) if number else ():
                parameter.data -= 0.02 * parameter.grad
                parameter.grad = None
    if not layer.late:
        nothing_kept(layer.name, always.kept())


OUTPUT = [  # of (got, right, bias, ranks)
    (lambda s: alike(s[0], s[1] - s[2]), "It lacks the bias of the row layer: add it after g."),
    (lambda s: s[3] > 1 and alike(s[0], s[1] + (s[3] - 1) * s[2]),
     lambda s: f"It has the bias of the row layer {s[3]} times: add it after g."),
    (lambda s: True, "Does every part take its turn, as in the whole layer, and are the ranks' "
     "results added up: g?"),
]
GRADIENT = (
    "The output is right. What does each rank know of this gradient, and who adds up what the "
    "ranks know?\nIs anything counted on every rank?"
)


def one_pass(
    answer: Any, layer: Layer, number: int, mine: nn.Module, parts: dict, whole: nn.Module
) -> None:
    """A batch, forward and backward."""
    (b, t), size, hidden = layer.shapes[number], dist.get_world_size(), layer.config.hidden_size
    where, (x, dy, more) = f"a batch of shape {(b, t, hidden)}", layer.inputs(number)
    wide = x.double().clone().requires_grad_()
    right = whole(wide, *(table.double() for table in more))
    right.backward(dy.double())
    positions = (1, shares(t, size)) if layer.sequence else None
    x, dy, right, right_dx = (part_of(z, positions) for z in (x, dy, right.detach(), wide.grad))
    x, truth = x.contiguous().requires_grad_(), dict(whole.named_parameters())
    with Look(x=x, tables=more, **parts) as forward:
        y = mine(x, *([t] if layer.sequence else more))
    saved = forward.kept(y, allowed=layer.most_saved(number)) if layer.sequence else 0
    with Look(x=x, dy=dy, **parts) as backward:
        y.backward(dy)
    with Look() as after:
        if layer.sequence and number:
            answer.sum_partial_gradients(mine)
    near = functools.partial(  # products of bf16 add up in fp32
        close, where, dtype=layer.dtype, slack=24 if layer.dtype == torch.bfloat16 else 512,
        scale=largest([right, right_dx, [p.grad for p in truth.values()]]),
    )
    bias = truth[next(iter(layer.cuts))].detach()
    near("the output", y, right, hint=told(OUTPUT, (y.detach(), right, bias, size)))
    nbytes, piece, names = hidden * layer.dtype.itemsize, b * -(-t // size), layer.cuts
    most, hint = {"all_reduce": b * t * nbytes}, "x enters once for all matrices that read it."
    if layer.sequence:
        most = {"all_gather": piece * nbytes, "reduce_scatter": piece * size * nbytes}
    for half, look in (("forward", forward), ("backward", backward)):
        unchanged(f"{where}, {half}", look.changed())
        sends(f"{where}, {half}", look, most, hint)
    hint = "The norm and the bias of the row layer: two tensors of C numbers."
    most = {"all_reduce": 2 * nbytes} if layer.sequence and number else {}
    sends(f"{where}, sum_partial_gradients", after, most, hint)
    near("the gradient of x", x.grad, right_dx, hint=GRADIENT)
    for name, cut in names.items():
        if cut or number or not layer.sequence:
            wanted = part_of(truth[name].grad, cut)
            near(f"the gradient of {name}", parts[name].grad, wanted, hint=GRADIENT)
    work = b * t * sum(p.numel() for n, p in parts.items() if n.endswith("proj.weight"))
    others = b * t * hidden  # the norm's backward pass has a product
    if layer.name == "ParallelAttention":
        others = 2 * b * t * t * names["q_proj.weight"][1][dist.get_rank()]  # scores
    for times, look in ((1, forward), (2, backward)):
        done = sum(product.multiplications for product in look.products)
        if done > times * (work + times * others):
            raise Wrong(
                f"{where}: {done:,} multiplications in the {('', 'forward', 'backward')[times]} "
                f"pass, and {times * (work + times * others):,} will do.\nDoes a rank compute with "
                "its own part only, and once?"
            )
    if layer.sequence and saved > layer.most_saved(number):
        raise Wrong(
            f"{where}: {saved:,} bytes are kept for the backward pass, and "
            f"{layer.most_saved(number):,} will do.\nWhat is computed on all positions, and could "
            "be on this rank's own?"
        )


def right_layers(trial: Trial, group: Group, name: str) -> None:
    """Judges layers of this name."""
    for layer in layers(trial, name, group.size):
        where = group.case(str(layer))
        group.run(where, splits, layer)
        group.run(where, trains, layer, late=layer.late)


# ---- c · heads


def head_sizes(answer: Any, cases: list[tuple[int, int, int]]) -> None:
    """On a rank: whole heads, groups together."""
    for heads, keys, head in cases:
        mine = shares(keys, dist.get_world_size())
        right = tuple(n * heads // keys * head for n in mine), tuple(n * head for n in mine)
        found = answer.head_sizes(heads, keys, head)
        if (got := tuple(tuple(int(n) for n in one) for one in found)) != right:
            raise Wrong(
                f"head_sizes({heads}, {keys}, {head}) is {got}, not {right}.\nA rank has whole "
                "heads, and the query heads that attend to its key-value heads."
            )


# ---- d · the loss


@dataclass(frozen=True)
class Tokens:
    """Logits of all words, and targets; masked: words whose logit is −inf; factor: of the loss,
    before it comes back."""

    kind: str
    sizes: Sequence[int]
    shape: tuple[int, int]
    targets: Sequence[int]
    dtype: torch.dtype
    seed: int
    masked: Sequence[int]
    scale: float
    offset: float
    smoothing: float
    z: float
    factor: float
    late: bool = False

    def logits(self) -> torch.Tensor:
        """(B, T, V)"""
        logits = self.offset + self.scale * fractions(self.seed, *self.shape, sum(self.sizes))
        logits[..., list(self.masked)] = -torch.inf
        return logits.to(self.dtype)

    def right(self, smoothing: float, z: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, gradient of all logits) in float64."""
        logits, targets = self.logits().double(), torch.tensor(self.targets).view(self.shape)
        counts = targets != IGNORED
        rows = logits.requires_grad_()[counts]
        loss = F.cross_entropy(rows, targets[counts], reduction="sum", label_smoothing=smoothing)
        loss = (loss + z * rows.logsumexp(-1).square().sum()) / max(1, int(counts.sum()))
        (loss * self.factor).backward()
        return loss.detach(), logits.grad

    def __str__(self) -> str:
        words = f"{len(self.targets)} tokens, {', '.join(map(str, self.sizes))} words"
        return f"{words} in {self.dtype}, {self.kind}" + ", results coming late" * self.late


def loss_cases(trial: Trial, size: int) -> list[Tokens]:
    """One of each kind; on 2 ranks the first once more, with results that come late."""
    draw, found = trial.draw, []
    for i, kind in enumerate(("no token is ignored", "logits of some thousands", "smoothing and z",
                              "masked words", "many tokens", "no token counts")):
        sizes = [draw.randrange(40, 80) for _ in range(size)]
        masked, ends = (), {0, *(sum(sizes[: rank + 1]) - 1 for rank in range(size))}
        if kind == "masked words":  # some, and all of a rank's; no target is one of them
            masked = {word for word in range(1, sum(sizes)) if draw.random() < 0.2}
            masked |= {*range(sizes[0], sum(sizes[:2]))}
        seen = [word for word in range(sum(sizes)) if word not in masked]
        shape = (3, 149) if kind == "many tokens" else (draw.randrange(1, 4), draw.randrange(2, 9))
        targets = [
            draw.choice(draw.choice((seen, [*ends.difference(masked)])))
            for _ in range(shape[0] * shape[1])
        ]
        skipped = {0: 0, 5: len(targets)}.get(i, -(-len(targets) // 5))
        targets[:skipped] = [IGNORED] * skipped
        found.append(Tokens(
            kind, sizes, shape, targets, TYPES[2 if i == 4 else (i + size) % 2], trial.new_seed(),
            sorted(masked), scale=draw.uniform(500, 2000) if i == 1 else draw.uniform(1, 6),
            offset=draw.choice((-900, 900)) if i in (2, 3) else 0.0,
            smoothing=draw.choice((0.05, 0.1, 0.3)) if i in (1, 2, 4) else 0.0,
            z=draw.uniform(1e-4, 0.05) if i > 1 else 0.0, factor=draw.uniform(0.3, 3.0),
        ))
    return found + [replace(found[0], late=True)] * (size == 2)


LOSS = [  # of (got, right, tokens)
    (lambda s: s[2].kind == "no token counts", "The mean over no token: what is it divided by?"),
    (lambda s: not s[0].isfinite() and s[2].masked,
     "exp(−inf) is 0. What are 0 · (−inf) and (−inf) − (−inf)?"),
    (lambda s: not s[0].isfinite(),
     "exp of thousands is infinite, of minus thousands 0: what is subtracted first?"),
    (lambda s: alike(s[0], s[1] * (1 - s[2].targets.count(IGNORED) / len(s[2].targets)), 64),
     "It is divided by all tokens: how many count?"),
    (lambda s: s[2].z and alike(s[0], s[2].right(s[2].smoothing, 0.0)[0], 64),
     "It is the loss without z."),
    (lambda s: s[2].smoothing and alike(s[0], s[2].right(0.0, s[2].z)[0], 64),
     "It is the loss without smoothing."),
    (lambda s: True, "Which of the numbers of a token is still a rank's own? Do all ranks subtract "
     "the same number?"),
]


def loses(answer: Any, tokens: Tokens) -> torch.Tensor:
    """On a rank: the loss, and the gradient of its logits; raises Wrong."""
    size, count = dist.get_world_size(), len(tokens.targets)
    targets, sizes = torch.tensor(tokens.targets).view(tokens.shape), tuple(tokens.sizes)
    own = part_of(tokens.logits(), (2, sizes)).contiguous()
    buffer = own.numel() * max(4, own.element_size())  # bytes of its logits, in the loss's type
    with Look(logits=own.requires_grad_(), targets=targets) as look:
        loss = answer.vocabulary_loss(own, targets, sizes, tokens.smoothing, tokens.z)
    saved = look.kept(loss, allowed=buffer + 64 * count + 256)
    with Look() as backward:
        (loss * tokens.factor).backward()
    loss, gradient, own.grad = loss.detach().clone(), own.grad, None
    right, whole = tokens.right(tokens.smoothing, tokens.z)
    kind = torch.promote_types(tokens.dtype, torch.float32)
    slack = 64 + 2 * largest(tokens.logits())  # log Z of large logits is rounded, and its exp again
    hint = told(LOSS, (loss, right, tokens)) if loss.shape == right.shape else ""
    close("vocabulary_loss", "the loss", loss, right, hint=hint, dtype=kind, slack=slack)
    unchanged("vocabulary_loss", look.changed())
    hint = "The loss is right. What does each term make of a logit, and what comes back through g?"
    close("vocabulary_loss", "the gradient of the logits", gradient, part_of(whole, (2, sizes)),
          hint=hint, dtype=tokens.dtype, slack=1 if kind != tokens.dtype else slack)
    sent = float(sum(event.sent for event in look.events))
    most = 2 * (size - 1) * 3 * count * kind.itemsize / size
    if len(look.events) > 3 or sent > most + 1e-6:
        raise Wrong(
            f"{len(look.events)} messages, in which a rank sends {sent:,.0f} bytes for {count} "
            f"tokens; {most:,.0f} bytes\nwill do: all-reduces of three numbers a token. Logits "
            "stay where they are."
        )
    sends("the backward pass of vocabulary_loss", backward, {})
    longest = max(look.largest, backward.largest)
    if longest > buffer or saved > buffer + 64 * count + 256:
        raise Wrong(
            f"a tensor of {longest:,} bytes is made, and {saved:,} bytes are kept for the backward "
            f"pass. This rank's\nlogits are {buffer:,} bytes in the type of the loss, and one "
            "tensor of them will do. Which operation\nkeeps which of its inputs?"
        )
    nothing_kept("vocabulary_loss", look.kept() + backward.kept(gradient))
    return loss + 0.0  # −0 is 0


# ---- the exercises


def right_pair(trial: Trial, group: Group) -> None:
    right_functions(trial, group, ("copy_to_region", "reduce_from_region"))


def right_mlp(trial: Trial, group: Group) -> None:
    for function in ("column", "row"):
        lengths = [trial.draw.randrange(1, 9) for _ in range(group.size)]
        lengths[-1] *= group.size != 3 or function == "column"  # perhaps none
        where = group.case(f"{function} of lengths {', '.join(map(str, lengths))}")
        group.run(where, cuts_linear, function, lengths, trial.draw.choice(TYPES))
    right_layers(trial, group, "ParallelMLP")


def right_attention(trial: Trial, group: Group) -> None:
    cases = []
    for most in (9, 9, 9, 9, 40, 100):
        keys = group.size + trial.draw.randrange(most)
        cases.append((keys * trial.draw.randrange(1, most), keys, trial.draw.randrange(1, 130)))
    group.run(group.case(), head_sizes, cases)
    right_layers(trial, group, "ParallelAttention")


def right_loss(trial: Trial, group: Group) -> None:
    for tokens in loss_cases(trial, group.size):
        where = group.case(str(tokens))
        same_bits(where, "the loss", group.run(where, loses, tokens, late=tokens.late))


def right_sequence(trial: Trial, group: Group) -> None:
    right_functions(trial, group, ("gather_to_region", "reduce_scatter_from_region"))
    right_layers(trial, group, "SequenceMLP")


pair = exercise(
    right_pair,
    "copy_to_region: nothing forward, a sum backward; reduce_from_region: a sum forward,\n"
    "nothing backward; one all-reduce each, of as many bytes as the tensor has; on 1 to 6\n"
    "ranks, with tensors of many shapes, two layouts and three types; no tensor that was\n"
    "given is changed, and nothing is kept.",
)
mlp = exercise(
    right_mlp,
    "column and row cut at any lengths; output, gradient of x and of every part equal the\n"
    "whole layer's on 1 to 6 ranks; one all-reduce forward, one backward; each rank holds its\n"
    "part and no more, and multiplies with nothing else.",
)
attention = exercise(
    right_attention,
    "whole heads, each group with its key-value head, for many numbers of heads on 1 to 6\n"
    "ranks; output and all gradients equal the whole layer's; one all-reduce forward, one\n"
    "backward; each rank holds its part and no more, and multiplies with nothing else.",
)
loss = exercise(
    right_loss,
    "loss and gradient equal those of the whole vocabulary on 1 to 6 ranks: smoothing, z,\n"
    "tokens that do not count, masked words, large logits, three types; no more is sent than\n"
    "three numbers a token; one tensor of this rank's logits is kept, none of all words made.",
)
sequence = exercise(
    right_sequence,
    "all positions in, own positions of the sum out, at lengths that N does not divide and on\n"
    "ranks without a position; output and all gradients equal the whole layer's on 1 to 6\n"
    "ranks; a reduce-scatter and an all-gather in place of an all-reduce, the same bytes sent\n"
    "(with the filling); between the matrices 1/N of the positions is kept.",
)
