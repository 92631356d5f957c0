"""Given: the contracts of exercises 06a to 06e, and the judges behind their check cells."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from utils.course.assertions import (
    PARALLEL,
    Wrong,
    alike,
    bitwise_equal,
    close,
    communication,
    same_bits,
    told,
    unchanged,
)
from utils.course.contract import largest
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Group, Trial, fractions
from utils.models.gpt import MLP, Attention, GPTConfig, RMSNorm, rotary_tables
from utils.shares import shares

TYPES = (torch.float64, torch.float32, torch.bfloat16)
IGNORED = -100


def exercise(says: str) -> Callable[[Callable[[Trial, Group], None]], Callable[[Trial], str]]:
    """Make a judge of a function that checks a group of ranks. says: text for a right answer."""

    def check_of(looks_at: Callable[[Trial, Group], None]) -> Callable[[Trial], str]:
        def judge(trial: Trial) -> str:
            trial.forbid(PARALLEL)
            for group in trial.groups(hang="Do all ranks call the same collectives, in one order?"):
                looks_at(trial, group)
            return says

        return judge

    return check_of


def sends(where: str, look: Look, right: dict[str, int], hint: str = "") -> None:
    """Each operation is called once, with at most this many bytes; a single rank needs none."""
    events = look.events
    if dist.get_world_size() == 1 and not events:
        return
    once = sorted(event.op for event in events) == sorted(right)
    if not once or any(event.payload > right[event.op] for event in events):
        communication(where, events, {op: [most] for op, most in right.items()}, hint)


def part_of(tensor: torch.Tensor, cut: tuple[int, Sequence[int]] | None) -> torch.Tensor:
    """This rank's shard. cut: (dimension, length on each rank), or None if it is not sharded."""
    return tensor if cut is None else tensor.split(list(cut[1]), dim=cut[0])[dist.get_rank()]


# ---- a and e · autograd functions: what each half does with the tensors of all ranks

WAYS = {
    "copy_to_region": ("nothing", "sum"),
    "reduce_from_region": ("sum", "nothing"),
    "gather_to_region": ("gather", "scatter"),
    "reduce_scatter_from_region": ("scatter", "gather"),
}
SUMS = [  # of (got, right, own, ranks)
    (lambda s: alike(s[0], s[2]),
     "It is this rank's own. All ranks take part: their tensors are added up."),
    (lambda s: alike(s[0], s[1] / s[3]),
     "It is the mean over the ranks. Every rank counts in full: a sum."),
    (lambda s: True, "It must be the sum over the ranks. Is the result there before it is used?"),
]
HINTS = {
    "nothing": "f passes x on, which is the same on all ranks. g passes the gradient on: "
    "the\nderivative of the sum with respect to each rank's x is 1.",
    "gather": "It should be all positions in rank order, with no padding between them.",
}


def applies(
    answer: Any, function: str, shape: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> None:
    """On a rank: apply the function to x of shape (B, T, C), or to this rank's positions, forward
    and backward; raises Wrong. Every other rank has a transposed layout."""
    (b, t, c), rank, size = shape, dist.get_rank(), dist.get_world_size()
    sizes, value = shares(t, size), shape[0] * shape[2] * dtype.itemsize
    most = {
        "nothing": {}, "sum": {"all_reduce": t * value},
        "gather": {"all_gather": sizes[0] * value},
        "scatter": {"reduce_scatter": sizes[0] * size * value},
    }
    for half, way in enumerate(WAYS[function]):
        lengths = sizes if way == "gather" else (t,) * size
        every = [fractions(seed + 10 * half + r, c, n, b) for r, n in enumerate(lengths)]
        every = [x.to(dtype).permute(2, 1, 0) for x in every]
        given = every[rank] if rank % 2 else every[rank].contiguous()
        with Look(**{("x", "dy")[half]: given}) as look:
            if half == 0:
                x = given.requires_grad_()
                got = y = getattr(answer, function)(x, *[t] * (function == "gather_to_region"))
            else:
                (got,) = torch.autograd.grad(y, x, given)
        where, own = f"{function} of {shape} in {dtype}, {('forward', 'backward')[half]}", given
        unchanged(where, look.changed(), "Others may hold it too: all-reduce a clone.")
        right = given if way == "nothing" else torch.cat(every, dim=1)
        if way in ("sum", "scatter"):
            right = sum(x.double() for x in every)
        if way == "scatter":
            own, right = part_of(own, (1, sizes)), part_of(right, (1, sizes))
        hint = HINTS.get(way) or told(SUMS, (got.detach(), right, own, size))
        close(where, "the result", got, right, hint=hint, dtype=dtype, slack=8,
              scale=largest(every))
        sends(where, look, most[way], "Pad each shard to the longest, and no further.")
        if way == "nothing" and look.largest:
            raise Wrong(
                f"{where}: a tensor of {look.largest:,} bytes is made. It has nothing to compute: "
                "can it\npass on what it was given?"
            )


def right_functions(trial: Trial, group: Group, functions: Sequence[str]) -> None:
    """Judge two calls of each function; in the second, some rank may have no position. On 2 ranks,
    results also arrive late."""
    draw, size = trial.draw, group.size
    for function in functions:
        for t in (draw.randrange(1, 4 * size), draw.randrange(1, max(2, size))):
            shape, dtype = (draw.randrange(2, 19), t, draw.randrange(2, 9)), draw.choice(TYPES)
            for late in (False, True) if size == 2 else (False,):
                where = group.case("results that arrive late" * late)
                job = function, shape, dtype, trial.new_seed()
                group.run(where, applies, *job, late=late)


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
    """A layer of the answer, in fp64, and the shape (B, T) of a batch."""

    name: str
    config: GPTConfig
    shape: tuple[int, int]
    seed: int

    @property
    def sequence(self) -> bool:
        return self.name == "SequenceMLP"

    def whole(self) -> nn.Module:
        """The whole layer, the same on every rank."""
        layer = WHOLE[self.name](self.config).double()
        for i, parameter in enumerate(layer.parameters()):
            numbers = fractions(self.seed + i, *parameter.shape)
            parameter.data = numbers / parameter.shape[-1] ** 0.5
        return layer

    @property
    def cuts(self) -> dict[str, tuple[int, Sequence[int]] | None]:
        """{parameter: how it is sharded}, as for `part_of`; the row layer's bias is first."""
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

    def most_saved(self) -> int:
        """Bytes that SequenceMLP may keep for the backward pass: all positions once, its own
        columns four times, and its own positions up to three times (depending on how the norm is
        written)."""
        (b, t), hidden = self.shape, self.config.hidden_size
        size, rank = dist.get_world_size(), dist.get_rank()
        own, columns = shares(t, size)[rank], shares(self.config.mlp_size, size)[rank]
        return 8 * b * (t * hidden + 4 * t * columns + own * (3 * hidden + 2))

    def __str__(self) -> str:
        config = self.config
        if self.name == "ParallelAttention":
            return f"{config.heads} query and {config.kv_heads} key-value heads"
        return f"{config.mlp_size} columns"


def right_layers(trial: Trial, group: Group, name: str) -> None:
    """Judge two layers of this name; on 3 ranks an MLP has 2 columns, and one rank has none."""
    draw, size = trial.draw, group.size
    for _ in range(2):
        hidden, sizes = draw.randrange(5, 30), {"heads": 1, "head_dim": 2}
        if name == "ParallelAttention":
            keys, queries = size + draw.randrange(3), draw.randrange(1, 5)
            sizes = {"heads": keys * queries, "kv_heads": keys, "head_dim": draw.choice((2, 4, 6))}
            hidden = keys * queries * draw.randrange(1, 4)
        config = GPTConfig(
            vocab_size=2, layers=1, attention_bias=True, mlp_bias=True, hidden_size=hidden,
            intermediate_size=2 if size == 3 else draw.randrange(4, 40), **sizes,
        )
        shape = draw.randrange(1, 4), draw.randrange(2, 14)
        layer = Layer(name, config, shape, trial.new_seed())
        group.run(group.case(str(layer)), passes, layer)


def cuts_linear(answer: Any, function: str, lengths: list[int]) -> None:
    """On a rank: check column or row, sharded at arbitrary lengths."""
    dim = ("column", "row").index(function)
    linear = nn.Linear(*((sum(lengths), 5) if dim else (5, sum(lengths))))
    before = {name: p.detach().clone() for name, p in linear.named_parameters()}
    layer = getattr(answer, function)(linear, tuple(lengths))
    for name, cut in {"weight": (dim, lengths), "bias": None if dim else (0, lengths)}.items():
        got, right = getattr(layer, name), part_of(before[name], cut)
        if not bitwise_equal(got, right):
            raise Wrong(
                f"{name} of shape {tuple(got.shape)} is not this rank's shard, "
                f"{tuple(right.shape)} (outputs, inputs).\nA column layer is split along its "
                "outputs, a row layer along its inputs: where does this rank's shard begin?"
            )
        stored, own = got.untyped_storage().nbytes(), got.nbytes
        if stored > own:
            raise Wrong(
                f"{name} is a view: it keeps {stored:,} bytes alive, of which {own:,} are its own."
                "\nThat saves nothing: .clone() the shard."
            )
        if not bitwise_equal(getattr(linear, name), before[name]):
            unchanged(function, ["the whole layer"])


OUTPUT = [  # of (got, right, bias, ranks)
    (lambda s: alike(s[0], s[1] - s[2]), "It lacks the bias of the row layer: add it after g."),
    (lambda s: s[3] > 1 and alike(s[0], s[1] + (s[3] - 1) * s[2]),
     lambda s: f"It has the bias of the row layer {s[3]} times: add it after g."),
    (lambda s: True, "Are the operations those of the whole layer, and does g add up the ranks' "
     "results?"),
]
GRADIENT = (
    "The output is right. Which part of this gradient does each rank compute, and where are these "
    "added up?\nIs anything counted on every rank?"
)


def passes(answer: Any, layer: Layer) -> None:
    """On a rank: run a batch forward and backward, and compare with the whole layer; raises
    Wrong."""
    (b, t), size, hidden = layer.shape, dist.get_world_size(), layer.config.hidden_size
    whole, where = layer.whole(), f"a batch of shape {(b, t, hidden)}"
    given, cuts = layer.whole(), layer.cuts
    norm = [given.norm] if layer.sequence else []
    mine = getattr(answer, layer.name)(*norm, given)
    parts = {name: mine.get_parameter(name) for name in cuts}
    kept = sum(p.numel() for p in mine.parameters()) - sum(p.numel() for p in parts.values())
    if kept:
        raise Wrong(f"{layer.name} keeps {kept:,} elements beyond its shards. What needs them?")
    wide, dy = fractions(layer.seed + 50, b, t, hidden), fractions(layer.seed + 51, b, t, hidden)
    more, positions = (), (1, shares(t, size)) if layer.sequence else None
    if layer.name == "ParallelAttention":
        tables = rotary_tables(layer.config, torch.arange(t), torch.float64)
        more = [table[:, None] for table in tables]
    right = whole(wide.requires_grad_(), *more)
    right.backward(dy)
    right, right_dx, dy = (part_of(z, positions) for z in (right.detach(), wide.grad, dy))
    x = part_of(wide.detach(), positions).clone().requires_grad_()
    with Look(x=x) as forward:
        y = mine(x, *([t] if layer.sequence else more))
    most = layer.most_saved()
    saved = forward.kept(y, allowed=most) if layer.sequence else 0
    with Look(dy=dy) as backward:
        y.backward(dy)
    with Look() as after:
        if layer.sequence:
            answer.sum_partial_gradients(mine)
    truth, bias = dict(whole.named_parameters()), next(iter(cuts))
    scale = largest([right, right_dx, [p.grad for p in truth.values()]])
    hint = told(OUTPUT, (y.detach(), right, truth[bias].detach(), size))
    close(where, "the output", y, right, hint=hint, slack=512, scale=scale)
    nbytes, piece = 8 * hidden, b * shares(t, size)[0]
    allowed, hint = {"all_reduce": b * t * nbytes}, "x enters once, for all matrices that read it."
    if layer.sequence:
        allowed = {"all_gather": piece * nbytes, "reduce_scatter": piece * size * nbytes}
        sends(f"{where}, sum_partial_gradients", after, {"all_reduce": 2 * nbytes},
              "The norm and the bias of the row layer are two tensors of C elements.")
    for half, look in (("forward", forward), ("backward", backward)):
        unchanged(f"{where}, {half}", look.changed())
        sends(f"{where}, {half}", look, allowed, hint)
    gradients = {"x": (x.grad, right_dx)} | {
        name: (parts[name].grad, part_of(truth[name].grad, cut)) for name, cut in cuts.items()
    }
    for name, (got, wanted) in gradients.items():
        close(where, f"the gradient of {name}", got, wanted, hint=GRADIENT, slack=512, scale=scale)
    if layer.sequence and saved > most:
        raise Wrong(
            f"{where}: {saved:,} bytes are kept for the backward pass; {most:,} are enough.\nWhat "
            "is computed on all positions, but could be computed on this rank's own?"
        )


# ---- c · heads


def head_sizes(answer: Any, seed: int) -> None:
    """On a rank: check that head_sizes gives whole heads and keeps groups together."""
    size = dist.get_world_size()

    def holds(drawn: tuple[int, int, int]) -> None:
        keys, queries, head = size + drawn[0], drawn[1], drawn[2]
        mine = shares(keys, size)
        right = tuple(n * queries * head for n in mine), tuple(n * head for n in mine)
        found = answer.head_sizes(keys * queries, keys, head)
        if (got := tuple(tuple(int(n) for n in one) for one in found)) != right:
            raise Wrong(
                f"head_sizes({keys * queries}, {keys}, {head}) is {got}, not {right}.\nA rank has "
                "whole heads, and the query heads that attend to its key-value heads."
            )

    for_all(seed, st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 130)), holds, 30)


# ---- d · the loss


FACTOR = 0.7  # of the loss, before it comes back
KINDS = {  # scale of the logits, smoothing, z, and the fraction of tokens that do not count
    "no token is ignored": (3.0, 0.0, 0.0, 0.0),
    "logits in the thousands": (1500.0, 0.1, 0.0, 0.2),
    "smoothing and z": (5.0, 0.3, 0.03, 0.2),
    "masked words": (5.0, 0.0, 0.01, 0.2),
    "no token counts": (5.0, 0.0, 0.01, 1.0),
}


@dataclass(frozen=True)
class Tokens:
    """Logits of all words, and targets, of one of KINDS. sizes: words on each rank."""

    kind: str
    sizes: Sequence[int]
    shape: tuple[int, int]
    dtype: torch.dtype
    seed: int

    def given(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T, V) and (B, T)"""
        words, (scale, _, _, ignored) = sum(self.sizes), KINDS[self.kind]
        logits, liking = (fractions(self.seed + i, *self.shape, words) for i in (0, 1))
        if self.kind == "masked words":  # some, and all of rank 1's
            masked = fractions(self.seed + 2, words) > 0.8
            masked[self.sizes[0] : sum(self.sizes[:2])] = True
            masked[0] = False
            logits[..., masked] = liking[..., masked] = -torch.inf
        targets = liking.argmax(dim=-1)
        targets.view(-1)[: math.ceil(ignored * targets.numel())] = IGNORED
        return (scale * logits).to(self.dtype), targets

    def right(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, gradient of all logits) in float64."""
        (logits, targets), (_, smoothing, z, _) = self.given(), KINDS[self.kind]
        logits, counts = logits.double().requires_grad_(), targets != IGNORED
        rows = logits[counts]
        loss = F.cross_entropy(rows, targets[counts], reduction="sum", label_smoothing=smoothing)
        loss = (loss + z * rows.logsumexp(-1).square().sum()) / max(1, int(counts.sum()))
        (loss * FACTOR).backward()
        return loss.detach(), logits.grad

    def __str__(self) -> str:
        return f"{self.kind}, tokens {self.shape}, words {list(self.sizes)}, {self.dtype}"


LOSS = [  # of (got, right, kind, fraction of the tokens that count)
    (lambda s: s[2] == "no token counts", "It is the mean over no tokens: what is it divided by?"),
    (lambda s: not s[0].isfinite() and s[2] == "masked words",
     "exp(−inf) is 0. What are 0 · (−inf) and (−inf) − (−inf)?"),
    (lambda s: not s[0].isfinite(),
     "exp of thousands is infinite, of minus thousands 0: what is subtracted first?"),
    (lambda s: alike(s[0], s[1] * s[3], 64), "It is divided by all tokens: how many count?"),
    (lambda s: True, "Which of a token's values is still only one rank's? Do all ranks subtract "
     "the same value? Does it include smoothing and z?"),
]


def loses(answer: Any, tokens: Tokens) -> torch.Tensor:
    """On a rank: check the loss and the gradient of the logits, and return the loss; raises
    Wrong."""
    size, sizes, (logits, targets) = dist.get_world_size(), tuple(tokens.sizes), tokens.given()
    own, count = part_of(logits, (2, sizes)).contiguous(), targets.numel()
    buffer = own.numel() * max(4, own.element_size())  # bytes of its logits, in the loss's type
    most = buffer + 64 * count + 256
    with Look(logits=own.requires_grad_(), targets=targets) as look:
        loss = answer.vocabulary_loss(own, targets, sizes, *KINDS[tokens.kind][1:3])
    saved = look.kept(loss, allowed=most)
    with Look() as backward:
        (loss * FACTOR).backward()
    loss, (right, whole) = loss.detach(), tokens.right()
    kind = torch.promote_types(tokens.dtype, torch.float32)
    slack = 64 + 2 * largest(logits)  # log Z of large logits is rounded, and its exp again
    hint = told(LOSS, (loss, right, tokens.kind, (targets != IGNORED).double().mean()))
    close("vocabulary_loss", "the loss", loss, right, hint=hint, dtype=kind, slack=slack)
    unchanged("vocabulary_loss", look.changed())
    hint = "The loss is right. What is each term's derivative, and what flows back through g?"
    close("vocabulary_loss", "the gradient of the logits", own.grad, part_of(whole, (2, sizes)),
          hint=hint, dtype=tokens.dtype, slack=1 if kind != tokens.dtype else slack)
    sent = float(sum(event.sent for event in look.events))
    limit = 2 * (size - 1) * 3 * count * kind.itemsize / size
    if sent > limit + 1e-6:
        raise Wrong(
            f"a rank sends {sent:,.0f} bytes for {count} tokens; {limit:,.0f} bytes are enough: "
            "all-reduces of\nthree values per token. Logits stay where they are."
        )
    sends("the backward pass of vocabulary_loss", backward, {})
    longest = max(look.largest, backward.largest)
    if longest > buffer or saved > most:
        raise Wrong(
            f"a tensor of {longest:,} bytes is made, and {saved:,} bytes are kept for the backward "
            f"pass. This rank's\nlogits are {buffer:,} bytes in the type of the loss, and one such "
            "tensor is enough. Which operation\nkeeps which of its inputs?"
        )
    return loss + 0.0  # −0 is 0


# ---- the exercises


@exercise(
    "copy_to_region: nothing forward, a sum backward; reduce_from_region: a sum forward,\n"
    "nothing backward; one all-reduce each, of as many bytes as the tensor has; on 1 to 6\n"
    "ranks, with tensors of many shapes, two layouts and three types; no input is changed."
)
def pair(trial: Trial, group: Group) -> None:
    right_functions(trial, group, ("copy_to_region", "reduce_from_region"))


@exercise(
    "column and row split at any lengths; output and the gradients of x and every shard equal\n"
    "the whole layer's on 1 to 6 ranks; one all-reduce forward, one backward; each rank holds\n"
    "its shard and no more."
)
def mlp(trial: Trial, group: Group) -> None:
    for function in ("column", "row"):
        lengths = [trial.draw.randrange(1, 9) for _ in range(group.size)]
        lengths[-1] *= group.size != 3 or function == "column"  # perhaps none
        where = group.case(f"{function} of lengths {', '.join(map(str, lengths))}")
        group.run(where, cuts_linear, function, lengths)
    right_layers(trial, group, "ParallelMLP")


@exercise(
    "whole heads, each group with its key-value head, for many numbers of heads on 1 to 6\n"
    "ranks; output and all gradients equal the whole layer's; one all-reduce forward, one\n"
    "backward; each rank holds its shard and no more."
)
def attention(trial: Trial, group: Group) -> None:
    group.run(group.case(), head_sizes, trial.new_seed())
    right_layers(trial, group, "ParallelAttention")


@exercise(
    "loss and gradient equal those of the whole vocabulary on 1 to 6 ranks: smoothing, z,\n"
    "tokens that do not count, masked words, large logits, three types; at most three values\n"
    "per token are sent; one tensor of this rank's logits is kept, and none of all words is\n"
    "made."
)
def loss(trial: Trial, group: Group) -> None:
    for i, kind in enumerate(KINDS):
        sizes = [trial.draw.randrange(40, 80) for _ in range(group.size)]
        shape = trial.draw.randrange(1, 4), trial.draw.randrange(2, 9)
        tokens = Tokens(kind, sizes, shape, TYPES[(i + group.size) % 3], trial.new_seed())
        for late in (False, True) if group.size == 2 and i == 0 else (False,):
            where = group.case(str(tokens)) + ", results arriving late" * late
            same_bits(where, "the loss", group.run(where, loses, tokens, late=late))


@exercise(
    "each region gathers all positions and returns the rank's own positions of the sum, at\n"
    "lengths that N does not divide and on ranks without a position; output and all gradients\n"
    "equal the whole layer's on 1 to 6 ranks; a reduce-scatter and an all-gather instead of an\n"
    "all-reduce, the same bytes sent (padding included); between the matrices 1/N of the\n"
    "positions is kept."
)
def sequence(trial: Trial, group: Group) -> None:
    right_functions(trial, group, ("gather_to_region", "reduce_scatter_from_region"))
    right_layers(trial, group, "SequenceMLP")
