"""Given: what exercises 07a to 07d ask for, and how their check cells judge it."""

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from utils.course.assertions import PARALLEL, Wrong, close, unchanged
from utils.course.messages import never_waited, noted
from utils.course.observe import PRODUCTS, Look, looks
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions
from utils.measure.traffic import tensors_in
from utils.parallel.context.blocks import attend, attend_backward
from utils.parallel.context.positions import positions
from utils.ranks.pool import PRELOADED
from utils.shares import shares

PRELOADED.append(attend.__module__)
LIBRARY = (*PARALLEL, "distributed.nn", "dist.nn", "deepspeed", "context_parallel",
           "_functional_collectives")
FUSED = ("scaled_dot_product", "flash_attention", "efficient_attention")  # a kernel's name has one
SLACK = 512  # roundings

# ---- a · merge

# of each position: where the logarithm of both sums lies, from where exp is 0 to where it is
# infinite; None: no key was seen
ROWS = ((0, 0), (0, 0), (1, 1), (-1, -1), (1, -1), (0, 1), (0, None), (None, 0), (None, None))
SHAPE = (2, len(ROWS), 3, 40)
SHARES = (
    "out = (Z₁·out + Z₂·more) / (Z₁ + Z₂), where lse is the logarithm of Z₁: computed in lse's\n"
    "type. A Z may be infinite, or 0, in any type: exp(lse − larger) is at most 1. And where\n"
    "nothing was seen at all: what is −inf minus −inf?"
)


def merges(answer: Any, dtype: torch.dtype, seed: int) -> None:
    """On a rank: merge of two attentions of the same queries; raises Wrong."""
    wide = torch.promote_types(dtype, torch.float32)
    given, far = {}, 2000 if dtype == torch.float64 else 300
    for i, names in enumerate((("out", "lse"), ("more", "more_lse"))):
        out = 2 + fractions(seed + i, *SHAPE).tanh()
        lse = fractions(seed + 7 + i, *SHAPE[:3])
        for place, row in enumerate(ROWS):
            lse[:, place] += -torch.inf if row[i] is None else far * row[i]
            out[:, place] *= row[i] is not None
        out[0, i, 0] = torch.nan
        given |= dict(zip(names, (out.to(dtype), lse.to(wide))))
    with Look(**given) as look:
        got, got_lse = answer.merge(*given.values())
    unchanged(where := f"out {SHAPE} in {dtype}", look.changed())
    out, lse, more, more_lse = (x.double() for x in given.values())
    total = torch.logaddexp(lse, more_lse)
    first, second = (
        (x - total).exp().masked_fill(x == -torch.inf, 0.0)[..., None] for x in (lse, more_lse)
    )
    close(where, "lse", got_lse, total, hint=SHARES, dtype=wide)
    # bf16 is rounded once: all else has the digits of fp32
    slack = 0.53 if dtype == torch.bfloat16 else 64 + 8 * far
    right = out * first + more * second
    close(where, "out", got, right, hint=SHARES, dtype=dtype, slack=slack)


def merge(trial: Trial) -> str:
    """Judges `merge`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as alone:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            alone.run("two attentions", merges, dtype, trial.new_seed())
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
        ranks = positions(self.length, self.size, balanced=self.zigzag)
        return [[place for block in blocks for place in block] for blocks in ranks]

    @property
    def blocks(self) -> list[int]:
        """Bytes of each rank's keys and values."""
        each = 2 * self.batch * self.kv_heads * self.width * self.dtype.itemsize
        return [len(mine) * each for mine in self.places]

    def part(self, rank: int) -> dict[str, torch.Tensor]:
        """A rank's q, k, v and dout, in their type; out, lse and the gradients in float64."""
        counts = self.heads, self.kv_heads, self.kv_heads, self.heads
        given = [
            fractions(self.seed + i, self.batch, self.length, count, self.width, dtype=self.dtype)
            for i, count in enumerate(counts)
        ]
        *qkv, dout = (x.double() for x in given)
        out, lse = attend(*qkv, causal=True)
        gradients = attend_backward(dout, *qkv, out, lse, causal=True)
        names = "q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv"
        whole = zip(names, (*given, out, lse.mT, *gradients), strict=True)
        return {name: x[:, self.places[rank]] for name, x in whole}

    def __str__(self) -> str:
        words = f"{self.length} positions, {self.heads} query and {self.kv_heads} key-value heads"
        return f"{words}, {self.dtype}" + ", messages coming late" * self.late


def ring_cases(trial: Trial, size: int, zigzag: bool = False) -> list[Case]:
    """Two: N (or 2N blocks) divides the length of the second only, which on 2 ranks is long. On 2
    and 3 ranks the first once more, with messages that come late."""
    draw, found, parts = trial.draw, [], size * (1 + zigzag)
    for i, dtype in enumerate(draw.sample([torch.float64, torch.float32], 2)):
        length = parts * (draw.randrange(2, 4) + 15 * (i == 1 and size == 2))
        length += 0 if i or parts == 1 else draw.randrange(1, parts)
        kv_heads, width = draw.randrange(1, 4), draw.randrange(2, 6) + 15 * i
        heads = kv_heads * (1 if i else draw.randrange(1, 4))
        seed = trial.new_seed()
        found.append(Case(size, length, 2, heads, kv_heads, width, dtype, seed, zigzag))
    return found + [replace(found[0], late=True)] * (size in (2, 3))


def ulysses_cases(trial: Trial, size: int) -> list[Case]:
    """The same, with heads for all ranks: two key-value heads each, and in the second two in all,
    and from 3 ranks on query heads that N does not divide."""
    found = [replace(case, kv_heads=2 * size, heads=4 * size) for case in ring_cases(trial, size)]
    found[1] = replace(found[1], kv_heads=2, heads=2 * (size + 1))
    return found


# ---- what is seen of an answer


class AttentionLook(Look):
    """A `Look` that also counts attention kernels, says when each product was, and how much of what
    was received is in memory at a time.

    notes: of `noted()`; near: bytes received for more of which the backend is given time to let go.
    """

    def __init__(self, notes: list, near: float = math.inf, **inputs: Any):
        super().__init__(**inputs)
        self.notes, self._near, self._received = notes, near, []
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
            self.works.append((count, len(self.notes)))
        elif name in PRODUCTS and func.namespace == "aten":
            self.works.append((self.products[-1].multiplications, len(self.notes)))

    @property
    def multiplications(self) -> int:
        return sum(count for count, _ in self.works)

    def _held_now(self) -> int:
        alive = {id(storage): storage for one in self._received if (storage := one()) is not None}
        return sum(storage.nbytes() for storage in alive.values())


# ---- messages


def ring_messages(
    case: Case, rank: int, look: AttentionLook, gradients: bool = False
) -> None:
    """Sends to the next rank and receives from the one before: the blocks (and their gradients)."""
    size, blocks, events = case.size, case.blocks, look.events
    after, before = (rank + 1) % size, (rank - 1) % size
    peers = {"send": after, "recv": before}
    for event in events:
        if event.op not in peers or event.peer not in (None, -1, peers[event.op]):
            raise Wrong(
                f"{event.op} is called. A ring sends to the next rank, {after},\n"
                f"and receives from the one before, {before}."
            )
    sent = [event.payload for event in events if event.op == "send"]
    limit = sum(blocks) - blocks[after] + gradients * sum(blocks)
    most = 2 * (size - 1) + 2 * size * gradients
    if size > 1 and (sum(sent) > limit or len(sent) > most):
        what = "N − 1 blocks" + " and N of gradients" * gradients
        raise Wrong(
            f"this rank sends {sum(sent):,} bytes in {len(sent)} messages. {what} have {limit:,}, "
            f"and\n{most} messages will do. Does anything travel twice, or wider than it is?"
        )


def ulysses_messages(case: Case, rank: int, look: AttentionLook) -> None:
    """At most four all-to-alls, that take to each rank what its heads need."""
    events = look.events
    queries, keys = right_heads(case.heads, case.kv_heads, case.size)
    if {event.op for event in events} - {"all_to_all"} or len(events) > 4:
        raise Wrong(f"{[event.op for event in events]} are called. Two all-to-alls will do.")
    lengths = [len(mine) for mine in case.places]
    right = case.batch * case.width * case.dtype.itemsize * sum(
        lengths[rank] * (len(queries[r]) + 2 * len(keys[r])) + lengths[r] * len(queries[rank])
        for r in range(case.size) if r != rank
    )
    sent = sum(event.sent for event in events)
    if sent != right:
        raise Wrong(
            f"this rank sends {float(sent):,.0f} bytes to others, and {right:,} are right:\n"
            "its positions of their heads, a key-value head once, and of its heads their positions."
        )


# ---- work and memory


def no_more_work(case: Case, look: AttentionLook, products: int, hint: str) -> None:
    """products: of vectors of a head; one number more is for those who sum by a product."""
    width, done = case.width, look.multiplications
    if done > products * (width + 1):
        raise Wrong(f"it multiplies {done:,} times, and {products * width:,} will do.\n{hint}")


def under_way(look: AttentionLook) -> None:
    """Whenever a rank computes and has more to receive, a receive is under way; so with sends."""
    notes = look.notes
    waited = {note.number: place for place, note in enumerate(notes) if note.name == "wait"}
    for name, what in (("irecv", "to this rank"), ("isend", "from this rank")):
        calls = [(place, waited[place]) for place, note in enumerate(notes) if note.name == name]
        for i, (_, now) in enumerate(look.works):
            running = any(begin < now <= end for begin, end in calls)
            later = any(begin >= now for begin, _ in calls)
            if not running and (later or (i == 0 and calls)):
                raise Wrong(
                    f"it computes while nothing is under way {what}, and it has messages that "
                    "could be.\nStart the next messages first, then compute, then wait."
                )


def ring_costs(
    case: Case, rank: int, look: AttentionLook, gradients: bool = False
) -> None:
    """Nothing unseen is multiplied, messages are under way meanwhile, and few are in memory."""
    under_way(look)
    mine = case.places[rank]
    others = {*range(case.length)} - {*mine}
    pairs = len(mine) ** 2 + sum(key < query for key in others for query in mine)
    no_more_work(
        case, look, (5 if gradients else 2) * case.batch * case.heads * pairs,
        "Which blocks do this rank's positions not see at all, and what is computed of them?",
    )
    if look.held > most_held(case, gradients):
        raise Wrong(
            f"{look.held:,} bytes that came from others are in memory at a time, and a block "
            f"has {max(case.blocks):,}.\nWho still holds those that were computed with?"
        )


def most_held(case: Case, gradients: bool) -> int:
    """Bytes of others that a rank may hold: of each kind (blocks, their gradients) one to compute
    with, one on its way, and one that a name still holds."""
    return 3 * (1 + gradients) * max(case.blocks)


def ulysses_costs(case: Case, rank: int, look: AttentionLook) -> None:
    products = 2 * case.batch * shares(case.heads, case.size)[rank] * case.length**2
    no_more_work(case, look, products, "This rank's heads, and no others.")


# ---- functions without ranks


def right_heads(heads: int, kv_heads: int, ranks: int) -> tuple[list, list]:
    """The query heads and the key-value heads of each rank. Raises ValueError."""
    if ranks > heads:
        raise ValueError("a head is not split")
    queries = [mine for (mine,) in positions(heads, ranks, balanced=False)]
    return queries, [sorted({head // (heads // kv_heads) for head in mine}) for mine in queries]


def gives(
    answer: Any, name: str, reference: Callable, options: Sequence[Sequence[int]], seed: int
) -> None:
    """On a rank: the reference's lists of lists of numbers, for drawn arguments; raises Wrong."""

    def outcome(function: Callable, given: tuple[int, ...]) -> Any:
        try:
            return [[list(map(int, some)) for some in mine] for mine in function(*given)]
        except ValueError:
            return "a ValueError"

    def holds(given: tuple[int, ...]) -> None:
        found, right = (outcome(one, given) for one in (getattr(answer, name), reference))
        if found != right:
            raise Wrong(f"{name}{given} gives\n{found}, and\n{right} is right.")

    for_all(seed, st.tuples(*map(st.sampled_from, options)), holds, 50)


# ---- the exercises


@dataclass(frozen=True)
class Attention:
    """What `function` of an answer promises, on ranks that share a sequence.

    question         what to ask about a wrong result
    given, results   names of its arguments (but for the length) and of what it returns
    messages, costs  what it may send, compute and hold: raise Wrong
    first            a function that this one needs: as `gives` takes it
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
    messages: Callable[[Case, int, AttentionLook], None] = ring_messages
    costs: Callable[[Case, int, AttentionLook], None] = ring_costs
    first: tuple[str, Callable, Sequence[Sequence[int]]] | None = None

    def judge(self, trial: Trial) -> str:
        """For `check`: what was looked at; raises Wrong."""
        trial.forbid(LIBRARY)
        if self.first:
            trial.alone(self.first[0], gives, *self.first, trial.new_seed())
        for group in trial.groups(hang=HANG):
            for case in self.cases(trial, group.size):
                group.run(group.case(str(case)), attends, self, case, late=case.late)
        return self.says


def attends(answer: Any, contract: Attention, case: Case) -> None:
    """On a rank: a call of the function; raises Wrong."""
    rank, near = dist.get_rank(), most_held(case, "dout" in contract.given)
    right = case.part(rank)
    inputs = {name: right[name].to(case.dtype) for name in contract.given}
    with noted() as notes, AttentionLook(notes, near, **inputs) as look:
        found = getattr(answer, contract.function)(*inputs.values(), case.length)
    for call in never_waited(notes):
        raise Wrong(f"nobody waits for an {call}. When may its tensor be used again?")
    found = [found] if isinstance(found, torch.Tensor) else found
    ask = {"hint": contract.question, "dtype": case.dtype, "slack": SLACK}
    for name, mine in zip(contract.results, found, strict=True):
        close(contract.function, name, mine, right[name], **ask)
    unchanged(contract.function, look.changed())
    contract.messages(case, rank, look)
    if not case.late:
        contract.costs(case, rank, look)


HANG = (
    "Who sends what a waiting rank is to receive? Does every rank take every turn? dist.send comes"
    "\nback only when the other rank receives: start both messages (isend, irecv), then wait, once."
)
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
    cases=functools.partial(ring_cases, zigzag=True),
    first=("zigzag_positions", positions, (range(16, 80), range(1, 9))),
).judge
ulysses = Attention(
    "ulysses_attention",
    "out equals one rank's on 1 to 6 ranks, in fp32 and fp64, for lengths and heads that N\n"
    "does not divide, and for fewer key-value heads than ranks; all-to-alls only, to each\n"
    "rank no byte more than its heads need; each rank computes its heads; more ranks than\n"
    "heads are refused.",
    "What arrives from rank r are r's positions of this rank's heads: in the order of the ranks\n"
    "they make the whole sequence. Which keys does each query head look at, and each position?",
    results=("out",), cases=ulysses_cases, messages=ulysses_messages, costs=ulysses_costs,
    first=("heads_of_ranks", right_heads, ((12,), (1, 2, 3, 4, 6, 12), range(1, 16))),
).judge
