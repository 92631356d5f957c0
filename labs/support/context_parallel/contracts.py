"""Given: what exercises 07a to 07d ask for, and how their check cells judge it."""

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from utils.course.assertions import PARALLEL, Wrong, alike, close, told, unchanged
from utils.course.messages import Note, never_waited, noted
from utils.course.observe import PRODUCTS, Look, looks
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions
from utils.measure.traffic import tensors_in
from utils.shares import shares

LIBRARY = (*PARALLEL, "distributed.nn", "dist.nn", "deepspeed", "context_parallel",
           "_functional_collectives")
FUSED = ("scaled_dot_product", "flash_attention", "efficient_attention")  # a kernel's name has one
SLACK = 512  # roundings


def consecutive(counts: Sequence[int]) -> list[list[int]]:
    """The numbers from 0, so many in each list."""
    numbers = iter(range(sum(counts)))
    return [list(itertools.islice(numbers, count)) for count in counts]


# ---- a · merge

# of each position: where the logarithm of both sums lies, from where exp is 0 to where it is
# infinite; None: no key was seen
ROWS = ((0, 0), (0, 0), (1, 1), (-1, -1), (1, -1), (0, 1), (0, None), (None, 0), (None, None))
NOTHING = "Nothing was seen at all: what is −inf minus −inf? Zeros and −inf are right."
INFINITE = (
    "An exponential has become infinite, or a sum of them zero. Can you do with exponentials\nof "
    "differences only? exp(lse − larger) is at most 1."
)
SHARES = (
    "out = (Z₁·out + Z₂·more) / (Z₁ + Z₂), where lse is the logarithm of Z₁: no plain sum, no "
    "mean.\nComputed in lse's type, and rounded to out's type at the end: .to(out.dtype)"
)


def merges(answer: Any, shape: Sequence[int], dtype: torch.dtype, seed: int) -> None:
    """On a rank: merge of two attentions of the same queries; raises Wrong."""
    batch, heads, width = shape
    given, far = {}, 2000 if dtype == torch.float64 else 300
    for i, names in enumerate((("out", "lse"), ("more", "more_lse"))):
        out = 2 + fractions(seed + i, batch, len(ROWS), heads, width).tanh()
        lse = fractions(seed + 7 + i, batch, len(ROWS), heads)
        for place, row in enumerate(ROWS):
            lse[:, place] += -torch.inf if row[i] is None else far * row[i]
            out[:, place] *= row[i] is not None
        out[0, i, 0] = torch.nan
        wide = torch.promote_types(dtype, torch.float32)
        given |= dict(zip(names, (out.to(dtype), lse.to(wide))))
    where = f"out {(batch, len(ROWS), heads, width)} in {dtype}"
    with Look(**given) as look:
        got, got_lse = answer.merge(*given.values())
    unchanged(where, look.changed())
    out, lse, more, more_lse = (x.double() for x in given.values())
    total = torch.logaddexp(lse, more_lse)
    first, second = (
        (x - total).exp().masked_fill(x == -torch.inf, 0.0)[..., None] for x in (lse, more_lse)
    )
    right, hint = out * first + more * second, SHARES
    if got.shape == right.shape and got_lse.shape == total.shape:
        odd = (got.isnan() & ~right.isnan()).any(-1) | got_lse.isnan()
        odd |= got_lse.isinf() & total.isfinite()
        hint = NOTHING if odd[total == -torch.inf].any() else INFINITE if odd.any() else SHARES
    close(where, "lse", got_lse, total, hint=hint, dtype=wide)
    slack = 64 + 8 * far
    if dtype == torch.bfloat16:  # rounded once: all else has the digits of fp32
        slack = 0.53
    close(where, "out", got, right, hint=hint, dtype=dtype, slack=slack)


def merge(trial: Trial) -> str:
    """Judges `merge`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as alone:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for shape in ((2, 3, 40), [trial.draw.randrange(1, most) for most in (3, 4, 8)]):
                alone.run("two attentions", merges, shape, dtype, trial.new_seed())
    return (
        "two attentions are one, in fp64, fp32 and bf16; however large or small\n"
        "the sums are; queries that have seen no key count for nothing, also where neither has\n"
        "seen one; a NaN stays with its query; nothing is changed that was given."
    )


# ---- b to d · a sequence on `size` ranks


@dataclass(frozen=True)
class Case:
    """A sequence of `length` positions. zigzag: each rank has an early and a late block, not
    neighbours; late: messages come late."""

    size: int
    length: int
    batch: int
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    seed: int
    zigzag: bool = False
    late: bool = False

    @property
    def places(self) -> list[list[int]]:
        """The positions of each rank."""
        if not self.zigzag:
            return consecutive(shares(self.length, self.size))
        blocks = consecutive(shares(self.length, 2 * self.size))
        return [blocks[rank] + blocks[-1 - rank] for rank in range(self.size)]

    @property
    def blocks(self) -> list[int]:
        """Bytes of each rank's keys and values."""
        each = 2 * self.batch * self.kv_heads * self.width * self.dtype.itemsize
        return [len(mine) * each for mine in self.places]

    def whole(self) -> dict[str, torch.Tensor]:
        """q, k, v and dout of the whole sequence, in its type."""
        heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads, "dout": self.heads}
        shapes = {n: (self.batch, self.length, count, self.width) for n, count in heads.items()}
        return {
            name: fractions(self.seed + i, *shape, dtype=self.dtype)
            for i, (name, shape) in enumerate(shapes.items())
        }

    def own(self, rank: int, names: Sequence[str] = "qkv") -> dict[str, torch.Tensor]:
        """A rank's part of these."""
        every = self.whole() | (self.right() if "lse" in names else {})
        return {name: every[name][:, self.places[rank]].to(self.dtype) for name in names}

    def right(self, causal: bool = True) -> dict[str, torch.Tensor]:
        """out, lse and the gradients of the whole sequence in float64."""
        made = {name: x.double().transpose(1, 2) for name, x in self.whole().items()}
        q, k, v = (made[name].requires_grad_() for name in "qkv")
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        gradients = torch.autograd.grad(out, (q, k, v), made["dout"])
        scores = q @ k.repeat_interleave(self.heads // self.kv_heads, dim=1).mT / self.width**0.5
        later = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        lse = scores.detach().masked_fill(later, -torch.inf).logsumexp(-1)
        names = "out", "lse", "dq", "dk", "dv"
        return {n: x.transpose(1, 2) for n, x in zip(names, (out.detach(), lse, *gradients))}

    def __str__(self) -> str:
        words = f"{self.length} positions, {self.heads} query and {self.kv_heads} key-value heads"
        return f"{words} of {self.width} in {self.dtype}" + ", messages coming late" * self.late


def ring_cases(trial: Trial, size: int, zigzag: bool = False) -> list[Case]:
    """Two: N (or 2N blocks) divides the length of the second only, which on 2 ranks is long. On 2
    and 3 ranks the first once more, with messages that come late."""
    draw, found, parts = trial.draw, [], size * (1 + zigzag)
    for i, dtype in enumerate(draw.sample([torch.float64, torch.float32], 2)):
        length = parts * (draw.randrange(2, 4) + 15 * (i == 1 and size == 2))
        length += 0 if i or parts == 1 else draw.randrange(1, parts)
        kv_heads, width = draw.randrange(1, 4), draw.randrange(2, 6) + 15 * i
        heads = kv_heads * (1 if i else draw.randrange(1, 4))
        batch, seed = draw.randrange(1, 4), trial.new_seed()
        found.append(Case(size, length, batch, heads, kv_heads, width, dtype, seed, zigzag))
    return found + [replace(found[0], late=True)] * (size in (2, 3))


def ulysses_cases(trial: Trial, size: int) -> list[Case]:
    """The same, with heads for all ranks: two key-value heads each, and in the second few of them,
    and query heads that N does not divide."""
    found = [replace(case, kv_heads=2 * size, heads=4 * size) for case in ring_cases(trial, size)]
    kv_heads = trial.draw.randrange(1, max(2, size - 1))
    group = -(-size // kv_heads) + trial.draw.randrange(1, 3)
    group += size > 1 and kv_heads * group % size == 0
    found[1] = replace(found[1], kv_heads=kv_heads, heads=kv_heads * group)
    return found


# ---- what is seen of an answer


class AttentionLook(Look):
    """A `Look` that also counts attention kernels, says when each product was, and how much of what
    was received is in memory at a time.

    notes: of `noted()`, opened before; near: bytes received that may be in memory at a time. Where
    they are more, the backend is given the time to let go of them, once.
    """

    def __init__(self, notes: list, near: float = math.inf, **inputs: Any):
        super().__init__(**inputs)
        self._notes, self._near, self._received = notes, near, []
        self.works: list[tuple[int, int]] = []  # multiplications, messages noted before them
        self.held = 0  # bytes received, or on their way here, at most at a time

    def saw(self, func: Callable, given: Any, outputs: bool) -> None:
        super().saw(func, given, outputs)
        name = func.__name__.split(".")[0]
        if outputs:
            return
        if name.startswith(("recv_", "irecv")) and func.namespace == "c10d":
            self._received.append(weakref.ref(next(tensors_in(given)).untyped_storage()))
            for _ in looks() if self.held <= self._near else ():
                if self._held_now() <= self._near:
                    break
            self.held = max(self.held, self._held_now())
        elif any(word in name for word in FUSED):
            q, k = given[0][1:3] if "backward" in name else given[0][:2]
            count = (5 if "backward" in name else 2) * math.prod(q.shape) * k.shape[-2]
            self.works.append((count, len(self._notes)))
        elif name in PRODUCTS and func.namespace == "aten":
            self.works.append((self.products[-1].multiplications, len(self._notes)))

    @property
    def multiplications(self) -> int:
        return sum(count for count, _ in self.works)

    def _held_now(self) -> int:
        alive = {id(storage): storage for one in self._received if (storage := one()) is not None}
        return sum(storage.nbytes() for storage in alive.values())


@dataclass(frozen=True)
class Seen:
    """A call of the function on one rank: what it has returned, and what it did."""

    case: Case
    rank: int
    got: dict[str, torch.Tensor]
    look: AttentionLook
    notes: list[Note]

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's positions."""
        return whole[:, self.case.places[self.rank]]

    @property
    def unmasked(self) -> bool:
        """Whether out is as if queries looked at all keys."""
        return "out" in self.got and alike(
            self.got["out"], self.mine(self.case.right(causal=False)["out"]), SLACK
        )


SYMPTOMS = [
    (lambda seen: never_waited(seen.notes),
     "Some messages are never waited for. Is what comes there before it is used?"),
    (lambda seen: seen.unmasked,
     "The positions look at all keys, also at those behind them: causal=True."),
]

# ---- messages


def ring_messages(seen: Seen, gradients: bool = False) -> None:
    """Only sends to the next rank and receives from the one before, of no more than the blocks, and
    of the gradients' blocks; all of them waited for."""
    size, blocks, events = seen.case.size, seen.case.blocks, seen.look.events
    after, before = (seen.rank + 1) % size, (seen.rank - 1) % size
    ways = {"send": (after, "to"), "recv": (before, "from")}
    for event in events:
        peer, way = ways.get(event.op, (None, ""))
        if not way or event.peer not in (None, -1, peer):
            raise Wrong(
                f"{event.op} is called{f' {way} rank {event.peer}' * bool(way)}. A ring is made of "
                f"sends to the next rank, {after},\nand receives from the one before, {before}."
            )
    for call in never_waited(seen.notes):
        raise Wrong(f"nobody waits for an {call}. When may its tensor be used again?")
    sent = [event.payload for event in events if event.op == "send"]
    limit = sum(blocks) - blocks[after] + gradients * sum(blocks)
    most = 2 * (size - 1) + 2 * size * gradients
    if size > 1 and (sum(sent) > limit or len(sent) > most):
        what = "N − 1 blocks" + " and N of gradients" * gradients
        raise Wrong(
            f"this rank sends {sum(sent):,} bytes in {len(sent)} messages. {what} have {limit:,}, "
            f"and\n{most} messages will do. Which block does the next rank have already? Does "
            "anything travel\ntwice, or wider than it is?"
        )


def ulysses_messages(seen: Seen) -> None:
    """At most four all-to-alls, that take to each rank what its heads need."""
    case, rank, events = seen.case, seen.rank, seen.look.events
    queries, keys = right_heads(case.heads, case.kv_heads, case.size)
    if {event.op for event in events} - {"all_to_all"} or len(events) > 4:
        raise Wrong(
            f"{', '.join(event.op for event in events)} are called. Two all-to-alls will do: "
            "queries, keys and\nvalues travel together."
        )
    positions = [len(mine) for mine in case.places]
    right = case.batch * case.width * case.dtype.itemsize * sum(
        positions[rank] * (len(queries[r]) + 2 * len(keys[r])) + positions[r] * len(queries[rank])
        for r in range(case.size) if r != rank
    )
    sent = sum(event.sent for event in events)
    if sent != right:
        raise Wrong(
            f"this rank sends {float(sent):,.0f} bytes to others, and {right:,} are right:\n"
            "its positions of their heads, and of its heads their positions. A key-value head "
            "goes to a\nrank once, and nothing is filled up: an all-to-all takes a size for every "
            "rank."
        )


# ---- work and memory


def no_more_work(seen: Seen, products: int, hint: str) -> None:
    """products: of vectors of a head; one number more is for those who sum by a product."""
    width, done = seen.case.width, seen.look.multiplications
    if done > products * (width + 1):
        raise Wrong(f"it multiplies {done:,} times, and {products * width:,} will do.\n{hint}")


def under_way(seen: Seen) -> None:
    """Whenever a rank computes and has more to receive, a receive is under way; so with sends."""
    notes = seen.notes
    waited = {note.number: place for place, note in enumerate(notes) if note.name == "wait"}
    for name, what in (("irecv", "to this rank"), ("isend", "from this rank")):
        calls = [
            (place, waited[place]) for place, note in enumerate(notes) if note.name == name
        ]
        for i, (_, now) in enumerate(seen.look.works):
            running = any(begin < now <= end for begin, end in calls)
            later = any(begin >= now for begin, _ in calls)
            if not running and (later or (i == 0 and calls)):
                raise Wrong(
                    f"it computes while nothing is under way {what}, and it has messages that "
                    "could be.\nStart the next messages first, then compute, then wait."
                )


def ring_costs(seen: Seen, gradients: bool = False) -> None:
    """Nothing unseen is multiplied, the next messages are under way meanwhile, and two blocks of
    others (and of their gradients) are in memory."""
    under_way(seen)
    case, mine = seen.case, seen.case.places[seen.rank]
    others = {*range(case.length)} - {*mine}
    pairs = len(mine) ** 2 + sum(key < query for key in others for query in mine)
    no_more_work(
        seen, (5 if gradients else 2) * case.batch * case.heads * pairs,
        "Which blocks do this rank's positions not see at all, and what is computed of them?",
    )
    if seen.look.held > most_held(case, gradients):
        raise Wrong(
            f"{seen.look.held:,} bytes that came from others are in memory at a time, and a block "
            f"has {max(case.blocks):,}.\nWho still holds those that were computed with?"
        )


def most_held(case: Case, gradients: bool) -> int:
    """Bytes of others that a rank may hold at a time: of each kind (blocks, their gradients) one to
    compute with, one on its way, and one that a name still holds."""
    return 3 * (1 + gradients) * max(case.blocks)


def ulysses_costs(seen: Seen) -> None:
    case = seen.case
    heads = len(right_heads(case.heads, case.kv_heads, case.size)[0][seen.rank])
    products = 2 * case.batch * heads * case.length**2
    no_more_work(seen, products, "This rank's heads, and no others.")


# ---- functions without ranks: properties


def right_heads(heads: int, kv_heads: int, ranks: int) -> tuple[list, list]:
    """The query heads and the key-value heads of each rank."""
    queries, group = consecutive(shares(heads, ranks)), heads // kv_heads
    return queries, [sorted({head // group for head in mine}) for mine in queries]


def heads_of_ranks(answer: Any, seed: int) -> None:
    """On a rank: who computes which heads, and that too many ranks are refused."""

    def holds(example: tuple[int, int, int]) -> None:
        kv_heads, group, ranks = example
        heads, found = kv_heads * group, None
        right = right_heads(heads, kv_heads, ranks) if ranks <= heads else None
        with contextlib.suppress(ValueError):
            both = answer.heads_of_ranks(heads, kv_heads, ranks)
            found = tuple([[int(head) for head in mine] for mine in one] for one in both)
        if found != right:
            raise Wrong(
                f"heads_of_ranks({heads}, {kv_heads}, {ranks}) gives {found or 'a ValueError'}, "
                f"and {right or 'a ValueError'} is right.\nNeighbouring query heads, "
                "shares(heads, ranks) of them, and the key-value heads that these look\nat, each "
                "once; more ranks than query heads are refused."
            )

    for_all(seed, st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 34)), holds, 50)


def zigzag_positions(answer: Any, seed: int) -> None:
    """On a rank: an early and a late block for each rank."""

    def holds(example: tuple[int, int]) -> None:
        ranks, length = example[0], 2 * example[0] + example[1]
        blocks = consecutive(shares(length, 2 * ranks))
        right = [(blocks[rank], blocks[-1 - rank]) for rank in range(ranks)]
        found = [tuple(map(list, one)) for one in answer.zigzag_positions(length, ranks)]
        if found != right:
            raise Wrong(
                f"zigzag_positions({length}, {ranks}) is {found}, and {right} is right.\n"
                "Block r from the front and block r from the back, of 2N blocks, "
                "shares(length, 2N) long."
            )

    for_all(seed, st.tuples(st.integers(1, 16), st.integers(0, 60)), holds, 50)


# ---- the exercises


@dataclass(frozen=True)
class Attention:
    """What `function` of an answer promises, on ranks that share a sequence.

    question         what to ask about a wrong result
    given, results   names of its arguments (but for the length) and of what it returns
    messages, costs  what it may send, compute and hold: raise Wrong
    first            a scenario for one rank: a function that this one needs
    """

    function: str
    says: str
    question: str = (
        "Whose keys are here in turn t, how many are there, and which of this rank's positions "
        "see\nthem? lse is the logarithm over all that are seen."
    )
    given: Sequence[str] = ("q", "k", "v")
    results: Sequence[str] = ("out", "lse")
    cases: Callable[[Trial, int], list[Case]] = ring_cases
    messages: Callable[[Seen], None] = ring_messages
    costs: Callable[[Seen], None] = ring_costs
    first: Callable[[Any, int], None] | None = None

    def judge(self, trial: Trial) -> str:
        """For `check`: what was looked at; raises Wrong."""
        trial.forbid(LIBRARY)
        if self.first:
            trial.alone(self.first.__name__, self.first, trial.new_seed())
        for group in trial.groups(hang=HANG):
            for case in self.cases(trial, group.size):
                group.run(group.case(str(case)), attends, self, case, late=case.late)
        return self.says


def attends(answer: Any, contract: Attention, case: Case) -> None:
    """On a rank: a call of the function; raises Wrong."""
    rank, near = dist.get_rank(), most_held(case, "dout" in contract.given)
    inputs, whole = case.own(rank, contract.given), case.right()
    with noted() as notes, AttentionLook(notes, near, **inputs) as look:
        found = getattr(answer, contract.function)(*inputs.values(), case.length)
    found = [found] if isinstance(found, torch.Tensor) else found
    seen = Seen(case, rank, dict(zip(contract.results, found, strict=True)), look, notes)
    for name, mine in seen.got.items():
        right = seen.mine(whole[name])
        wrong = mine.shape == right.shape and not alike(mine, right, SLACK)
        hint = told(SYMPTOMS, seen) or contract.question if wrong else ""
        close(contract.function, name, mine, right, hint=hint, dtype=case.dtype, slack=SLACK)
    unchanged(contract.function, look.changed(), "Attention leaves what it is given as it is.")
    contract.messages(seen)
    if not case.late:
        contract.costs(seen)


HANG = {
    "send": "dist.send comes back only when the other rank has begun to receive. When all ranks "
    "send\nfirst, nobody receives: start both messages (isend, irecv), then wait.",
    "": "Who sends what a waiting rank is to receive? Does every rank take every turn, also one "
    "that\nhas nothing to compute in it? A work is waited for once: a second wait() never ends.",
}
ring = Attention(
    "ring_attention",
    "out and lse equal one rank's on 1 to 6 ranks, in fp32 and fp64, for lengths that N does\n"
    "not divide and grouped heads, also when messages come late; N − 1 blocks a rank at most,\n"
    "under way while it computes; nothing unseen is multiplied; two blocks of others in memory.",
).judge
backward = Attention(
    "ring_attention_backward",
    "dq, dk and dv equal one rank's on 1 to 6 ranks, in fp32 and fp64, for lengths that N\n"
    "does not divide and grouped heads, also when messages come late; N − 1 blocks and N of\n"
    "gradients a rank at most, under way while it computes; nothing unseen is multiplied;\n"
    "two blocks of others, and of their gradients, in memory.",
    "dq is the sum over all blocks that a rank's queries see, each with out and lse of the\n"
    "attention to all keys. Every rank that looks at a key adds to its gradient: who adds last,\n"
    "and how many turns does a gradient travel?",
    ("dout", "q", "k", "v", "out", "lse"), ("dq", "dk", "dv"),
    messages=functools.partial(ring_messages, gradients=True),
    costs=functools.partial(ring_costs, gradients=True),
).judge
zigzag = Attention(
    "zigzag_attention",
    "an early and a late block for each rank; out and lse equal one rank's on 1 to 6 ranks,\n"
    "in fp32 and fp64, for any length, also when messages come late; no rank multiplies more\n"
    "than its positions need, which is the same for all where blocks are equal; messages and\n"
    "memory as in the ring.",
    cases=functools.partial(ring_cases, zigzag=True), first=zigzag_positions,
).judge
ulysses = Attention(
    "ulysses_attention",
    "out equals one rank's on 1 to 6 ranks, in fp32 and fp64, for lengths and heads that N\n"
    "does not divide, and for fewer key-value heads than ranks; all-to-alls only, to each\n"
    "rank no byte more than its heads need; each rank computes its heads; more ranks than\n"
    "heads are refused.",
    "What arrives from rank r are r's positions of this rank's heads: in the order of the ranks\n"
    "they make the whole sequence. Which key-value head does each query head look at?",
    results=("out",), cases=ulysses_cases, first=heads_of_ranks,
    messages=ulysses_messages, costs=ulysses_costs,
).judge
