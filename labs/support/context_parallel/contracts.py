"""Given: the contracts of exercises 07a to 07d, and the judges behind their check cells."""

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
FUSED = ("scaled_dot_product", "flash_attention", "efficient_attention")  # in kernels' names
SLACK = 512  # roundings

# ---- a · merge

# for each position, the magnitude of both sums' logarithms: −1 where exp is 0, 1 where it is
# infinite; None: no key was seen
ROWS = ((0, 0), (0, 0), (1, 1), (-1, -1), (1, -1), (0, 1), (0, None), (None, 0), (None, None))
SHAPE = (2, len(ROWS), 3, 40)
SHARES = (
    "out = (Z₁·out + Z₂·more) / (Z₁ + Z₂), computed in the type of lse, the logarithm of Z₁.\n"
    "A Z may be infinite, or 0, in any type: exp(lse − larger) is at most 1. And where no key\n"
    "was seen: what is −inf minus −inf?"
)


def merges(answer: Any, dtype: torch.dtype, seed: int) -> None:
    """On a rank: check the merge of two attentions of the same queries; raises Wrong."""
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
    # bf16 is rounded once: everything else has the precision of fp32
    slack = 0.53 if dtype == torch.bfloat16 else 64 + 8 * far
    right = out * first + more * second
    close(where, "out", got, right, hint=SHARES, dtype=dtype, slack=slack)


def merge(trial: Trial) -> str:
    """Judge `merge`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as alone:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            alone.run("two attentions", merges, dtype, trial.new_seed())
    return (
        "two attentions merge into one, in fp64, fp32 and bf16, for sums of any size; queries\n"
        "that have seen no key in one of them, or in both, contribute nothing; a NaN stays with\n"
        "its query; no input is changed."
    )


# ---- b to d · a sequence on `size` ranks


@dataclass(frozen=True)
class Case:
    """A sequence of `length` positions. zigzag: each rank has an early and a late block instead of
    one contiguous block; late: messages arrive late."""

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
        return f"{words}, {self.dtype}" + ", messages arriving late" * self.late


def ring_cases(trial: Trial, size: int, zigzag: bool = False) -> list[Case]:
    """Two cases: N (2N for zigzag) divides the length of the second only, which is long on 2 ranks.
    On 2 and 3 ranks, the first is repeated with messages that arrive late."""
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
    """Ring cases with enough heads for all ranks: two key-value heads per rank; in the second case,
    two in total and, on 3 or more ranks, query heads that N does not divide."""
    found = [replace(case, kv_heads=2 * size, heads=4 * size) for case in ring_cases(trial, size)]
    found[1] = replace(found[1], kv_heads=2, heads=2 * (size + 1))
    return found


# ---- what is observed of an answer


class AttentionLook(Look):
    """A `Look` that also counts attention kernels, and records when each product was computed and
    how many received bytes were in memory at a time.

    notes: of `noted()`; near: received bytes above which the backend is given time to release some.
    """

    def __init__(self, notes: list, near: float = math.inf, **inputs: Any):
        super().__init__(**inputs)
        self.notes, self._near, self._received = notes, near, []
        self.works: list[tuple[int, int]] = []  # multiplications, messages noted before them
        self.held = 0  # peak bytes received or being received

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
    """The blocks (and their gradients) are sent to the next rank and received from the previous."""
    size, blocks, events = case.size, case.blocks, look.events
    after, before = (rank + 1) % size, (rank - 1) % size
    peers = {"send": after, "recv": before}
    for event in events:
        if event.op not in peers or event.peer not in (None, -1, peers[event.op]):
            raise Wrong(
                f"{event.op} is called. A ring sends to the next rank, {after},\n"
                f"and receives from the previous one, {before}."
            )
    sent = [event.payload for event in events if event.op == "send"]
    limit = sum(blocks) - blocks[after] + gradients * sum(blocks)
    most = 2 * (size - 1) + 2 * size * gradients
    if size > 1 and (sum(sent) > limit or len(sent) > most):
        what = "N − 1 blocks" + " and N of gradients" * gradients
        raise Wrong(
            f"this rank sends {sum(sent):,} bytes in {len(sent)} messages. {what} have {limit:,}, "
            f"and\n{most} messages are enough. Is anything sent twice, or in a wider type?"
        )


def ulysses_messages(case: Case, rank: int, look: AttentionLook) -> None:
    """There are at most four all-to-alls, which send to each rank what its heads need."""
    events = look.events
    queries, keys = right_heads(case.heads, case.kv_heads, case.size)
    if {event.op for event in events} - {"all_to_all"} or len(events) > 4:
        raise Wrong(f"{[event.op for event in events]} are called. Two all-to-alls are enough.")
    lengths = [len(mine) for mine in case.places]
    right = case.batch * case.width * case.dtype.itemsize * sum(
        lengths[rank] * (len(queries[r]) + 2 * len(keys[r])) + lengths[r] * len(queries[rank])
        for r in range(case.size) if r != rank
    )
    sent = sum(event.sent for event in events)
    if sent != right:
        raise Wrong(
            f"this rank sends {float(sent):,.0f} bytes to others, and {right:,} are right:\n"
            "its positions of their heads (each key-value head once), and their positions of its "
            "heads."
        )


# ---- work and memory


def no_more_work(case: Case, look: AttentionLook, products: int, hint: str) -> None:
    """Check the multiplications. products: dot products of head vectors; one more multiplication
    each is allowed, for answers that sum by a matrix product."""
    width, done = case.width, look.multiplications
    if done > products * (width + 1):
        raise Wrong(f"it does {done:,} multiplications; {products * width:,} are enough.\n{hint}")


def under_way(look: AttentionLook) -> None:
    """While a rank computes and has more to receive, a receive is in flight; likewise for sends."""
    notes = look.notes
    waited = {note.number: place for place, note in enumerate(notes) if note.name == "wait"}
    for name, what in (("irecv", "to this rank"), ("isend", "from this rank")):
        calls = [(place, waited[place]) for place, note in enumerate(notes) if note.name == name]
        for i, (_, now) in enumerate(look.works):
            running = any(begin < now <= end for begin, end in calls)
            later = any(begin >= now for begin, _ in calls)
            if not running and (later or (i == 0 and calls)):
                raise Wrong(
                    f"it computes while no message {what} is in flight, although one could be.\n"
                    "Start the next messages first, then compute, then wait."
                )


def ring_costs(
    case: Case, rank: int, look: AttentionLook, gradients: bool = False
) -> None:
    """No masked block is computed, messages overlap with computing, and few blocks are held."""
    under_way(look)
    mine = case.places[rank]
    others = {*range(case.length)} - {*mine}
    pairs = len(mine) ** 2 + sum(key < query for key in others for query in mine)
    no_more_work(
        case, look, (5 if gradients else 2) * case.batch * case.heads * pairs,
        "Which blocks do this rank's positions not see at all, and what is computed for them?",
    )
    if look.held > most_held(case, gradients):
        raise Wrong(
            f"{look.held:,} bytes received from other ranks are in memory at a time, and a block "
            f"has {max(case.blocks):,}.\nWhat still holds blocks that have been used?"
        )


def most_held(case: Case, gradients: bool) -> int:
    """Bytes from other ranks that a rank may hold: of each kind (blocks, their gradients) one in
    use, one in flight, and one that a name still refers to."""
    return 3 * (1 + gradients) * max(case.blocks)


def ulysses_costs(case: Case, rank: int, look: AttentionLook) -> None:
    products = 2 * case.batch * shares(case.heads, case.size)[rank] * case.length**2
    no_more_work(case, look, products, "Compute this rank's heads, and no others.")


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
    """On a rank: the answer returns the reference's lists of lists of integers for drawn arguments;
    raises Wrong."""

    def outcome(function: Callable, given: tuple[int, ...]) -> Any:
        try:
            return [[list(map(int, some)) for some in mine] for mine in function(*given)]
        except ValueError:
            return "a ValueError"

    def holds(given: tuple[int, ...]) -> None:
        found, right = (outcome(one, given) for one in (getattr(answer, name), reference))
        if found != right:
            raise Wrong(f"{name}{given} returns\n{found}, and\n{right} is right.")

    for_all(seed, st.tuples(*map(st.sampled_from, options)), holds, 50)


# ---- the exercises


@dataclass(frozen=True)
class Attention:
    """The contract of `function`, on ranks that share a sequence.

    question         the question to ask about a wrong result
    given, results   names of its arguments (except the length) and of what it returns
    messages, costs  check what it sends, computes and holds; raise Wrong
    first            a function that this one needs, as arguments of `gives`
    """

    function: str
    says: str
    question: str = (
        "Which rank's keys are here in turn t, how many are there, and which of this rank's "
        "positions\nsee them? lse is the logarithm of the sum over all keys that are seen."
    )
    given: Sequence[str] = ("q", "k", "v")
    results: Sequence[str] = ("out", "lse")
    cases: Callable[[Trial, int], list[Case]] = ring_cases
    messages: Callable[[Case, int, AttentionLook], None] = ring_messages
    costs: Callable[[Case, int, AttentionLook], None] = ring_costs
    first: tuple[str, Callable, Sequence[Sequence[int]]] | None = None

    def judge(self, trial: Trial) -> str:
        """For `check`: return what was checked; raises Wrong."""
        trial.forbid(LIBRARY)
        if self.first:
            trial.alone(self.first[0], gives, *self.first, trial.new_seed())
        for group in trial.groups(hang=HANG):
            for case in self.cases(trial, group.size):
                group.run(group.case(str(case)), attends, self, case, late=case.late)
        return self.says


def attends(answer: Any, contract: Attention, case: Case) -> None:
    """On a rank: check a call of the function; raises Wrong."""
    rank, near = dist.get_rank(), most_held(case, "dout" in contract.given)
    right = case.part(rank)
    inputs = {name: right[name].to(case.dtype) for name in contract.given}
    with noted() as notes, AttentionLook(notes, near, **inputs) as look:
        found = getattr(answer, contract.function)(*inputs.values(), case.length)
    for call in never_waited(notes):
        raise Wrong(f"an {call} is never waited on. When may its tensor be used again?")
    found = [found] if isinstance(found, torch.Tensor) else found
    ask = {"hint": contract.question, "dtype": case.dtype, "slack": SLACK}
    for name, mine in zip(contract.results, found, strict=True):
        close(contract.function, name, mine, right[name], **ask)
    unchanged(contract.function, look.changed())
    contract.messages(case, rank, look)
    if not case.late:
        contract.costs(case, rank, look)


HANG = (
    "Which rank sends what a waiting rank is to receive? Does every rank take every turn? dist.send"
    "\nreturns only when the other rank receives: start both messages (isend, irecv), then wait."
)
ring = Attention(
    "ring_attention",
    "out and lse equal one rank's on 1 to 6 ranks, in fp32 and fp64, for lengths that N does\n"
    "not divide and grouped heads, even when messages arrive late; each rank sends at most\n"
    "N − 1 blocks, while it computes; no masked block is computed; two received blocks in\n"
    "memory.",
).judge
backward = Attention(
    "ring_attention_backward",
    "dq, dk and dv equal one rank's on 1 to 6 ranks, in fp32 and fp64, for lengths that N\n"
    "does not divide and grouped heads, even when messages arrive late; each rank sends at most\n"
    "N − 1 blocks and N blocks of gradients, while it computes; no masked block is computed;\n"
    "two received blocks, and two of gradients, in memory.",
    "dq is the sum over all blocks that a rank's queries see, each with out and lse of the\n"
    "attention to all keys. Every rank that uses a key adds to its gradient: which rank adds\n"
    "last, and for how many turns does a gradient travel?",
    ("dout", "q", "k", "v", "out", "lse"), ("dq", "dk", "dv"),
    messages=functools.partial(ring_messages, gradients=True),
    costs=functools.partial(ring_costs, gradients=True),
).judge
zigzag = Attention(
    "zigzag_attention",
    "each rank has an early and a late block; out and lse equal one rank's on 1 to 6 ranks,\n"
    "in fp32 and fp64, for any length, even when messages arrive late; no rank multiplies more\n"
    "than its positions need, which is the same for all if blocks are equal; messages and\n"
    "memory as in the ring.",
    cases=functools.partial(ring_cases, zigzag=True),
    first=("zigzag_positions", positions, (range(16, 80), range(1, 9))),
).judge
ulysses = Attention(
    "ulysses_attention",
    "out equals one rank's on 1 to 6 ranks, in fp32 and fp64, for lengths and heads that N\n"
    "does not divide, and for fewer key-value heads than ranks; only all-to-alls, which send\n"
    "each rank not a byte more than its heads need; each rank computes only its heads; more\n"
    "ranks than heads are refused.",
    "Rank r sends its positions of this rank's heads: in rank order they form the whole\n"
    "sequence. Which keys does each query head use, and which does each position see?",
    results=("out",), cases=ulysses_cases, messages=ulysses_messages, costs=ulysses_costs,
    first=("heads_of_ranks", right_heads, ((12,), (1, 2, 3, 4, 6, 12), range(1, 16))),
).judge
