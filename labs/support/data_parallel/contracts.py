"""Given: what exercises 01b, 01d and 01e ask for, and how their check cells judge it."""

import math
import numbers
from dataclasses import dataclass

import torch

from labs.support.data_parallel.longest_path import longest_path
from labs.support.data_parallel.timeline import timeline
from utils.course.assertions import Wrong, described
from utils.course.contract import BOTH, LARGE, Call, Case, Contract, Seen, observed, wider
from utils.course.runner import SIZES, Trial, fractions
from utils.ranks import RankError

BLOCKED = {  # questions, by what all ranks wait in
    "send": "dist.send comes back only when the other rank has begun to receive: when all ranks "
    "send\nfirst, no one ever receives. Let one of two neighbours receive first.",
    "recv": "All ranks wait to receive, and nobody sends: who begins?",
    "": "Who sends what a waiting rank is to receive, and who receives what it sends? Does every "
    "rank\ntake part, and in the same order?",
}

# ---- what is sent


def only_messages(where: str, calls: list[Call]) -> None:
    """Sends and receives alone."""
    for rank, call in enumerate(calls):
        if other := {event.op for event in call.events} - {"send", "recv"}:
            raise Wrong(
                f"{where}: rank {rank} calls {', '.join(sorted(other))}; build it yourself from "
                "sends and receives."
            )


def exchange_messages(where: str, case: "Lengths", calls: list[Call]) -> None:
    """One send of all that a rank has, one receive of all that the one before it has."""
    for rank, call in enumerate(calls):
        out, back = (case.lengths[r] * case.dtype.itemsize for r in (rank, rank - 1))
        sent = [(event.op, event.payload) for event in call.events]
        if sorted(sent) != [("recv", back), ("send", out)]:
            raise Wrong(
                f"{where}, rank {rank}: it calls {sent}; one send of {out} bytes and one recv of "
                f"{back} will do.{wider(call)}"
            )


def ring_messages(where: str, case: Case, calls: list[Call]) -> None:
    """2(N-1) messages of at most ⌈length/N⌉ numbers, all to one neighbour."""
    only_messages(where, calls)
    n, itemsize = len(calls), calls[0].result.itemsize
    length, right = calls[0].result.numel(), 2 * (n - 1)
    part = math.ceil(length / n) * itemsize
    for rank, call in enumerate(calls):
        biggest = max((event.payload for event in call.sends), default=0)
        if biggest > part:
            wide = wider(call)
            whole = ", the whole tensor," if biggest == length * itemsize and not wide else ""
            parts = "\nCut the tensor into N parts, and send one part at a time."
            raise Wrong(
                f"{where}: rank {rank} sends a message of {biggest} bytes{whole} where a ring "
                f"sends at most {part}: one part of N.{wide or parts}"
            )
        if len(peers := {event.peer for event in call.sends}) > 1:
            raise Wrong(
                f"{where}: rank {rank} sends to ranks {sorted(peers)}; in a ring it sends to one "
                "neighbour only."
            )
        full = length >= n  # else some parts are empty, and need not be sent
        if len(call.sends) > right or (full and len(call.sends) < right):
            raise Wrong(
                f"{where}: rank {rank} sends {len(call.sends)} messages where a ring sends "
                f"2(N-1) = {right}: N-1 that add and N-1 that copy."
            )


def asynchronous_messages(where: str, case: Case, calls: list[Call]) -> None:
    """Those of a ring, and each rank receives while it sends."""
    ring_messages(where, case, calls)
    taken, steps = timeline([call.notes for call in calls]), 2 * (len(calls) - 1)
    if taken > steps:
        raise Wrong(
            f"{where}: the ring takes as long as {taken} messages one after another; when every "
            f"rank sends\nand receives at the same time, it takes 2(N-1) = {steps}. What has a "
            "rank started when it waits?"
        )


def tree_messages(where: str, case: Case, calls: list[Call]) -> None:
    """None is larger than the tensor, and 2·⌈log2 N⌉ at most follow one another."""
    only_messages(where, calls)
    whole = calls[0].result.numel() * calls[0].result.itemsize
    for rank, call in enumerate(calls):
        for event in call.sends:
            if event.payload > whole:
                raise Wrong(
                    f"{where}: rank {rank} sends a message of {event.payload:,} bytes, and the "
                    f"whole tensor has {whole:,}.{wider(call)}"
                )
    steps = 2 * math.ceil(math.log2(len(calls)))
    path = longest_path([[(e.op, e.peer, e.payload) for e in call.events] for call in calls])
    if path > steps:
        raise Wrong(
            f"{where}: {path} messages follow one another, a tree has at most "
            f"2·⌈log2 {len(calls)}⌉ = {steps}.\nA rank sends or receives one message at a time: "
            "let more pairs talk at once."
        )


# ---- what a wrong sum looks like


def others_have_it(seen: Seen) -> list[int]:
    """The ranks with the right sum, where this one is not among them."""
    have = [
        rank for rank, call in enumerate(seen.calls)
        if torch.allclose(call.result.double(), seen.right, equal_nan=True)
    ]
    return [] if seen.rank in have else have


def own_places(seen: Seen) -> list[int]:
    return (seen.result == seen.own[0]).flatten().nonzero().flatten().tolist()[:8]


def still_own(seen: Seen) -> str:
    odd = "\nLengths that N does not divide need parts of different lengths."
    return (
        f"Places {own_places(seen)} still hold rank {seen.rank}'s own numbers: which part has them?"
        + odd * bool(seen.right.numel() % seen.size)
    )


SYMPTOMS = [
    (others_have_it, lambda seen: f"Ranks {others_have_it(seen)} have the sum: who sends it to "
     f"rank {seen.rank}?"),
    (lambda seen: seen.result.equal(seen.own[0]),
     "The tensor is as it was: change it in place, not a copy."),
    (own_places, still_own),
    (lambda seen: True,
     "Which part does each rank send in each step? Print the part's number and rank."),
]

# ---- the exercises


@dataclass(frozen=True)
class Lengths:
    """Of the ranks' messages, which differ."""

    lengths: list[int]
    dtype: torch.dtype
    seed: int
    late: bool
    calls: int = 1

    def message(self, rank: int) -> torch.Tensor:
        return fractions(self.seed + rank, self.lengths[rank], dtype=self.dtype)

    def __str__(self) -> str:
        return f"messages of {self.lengths} numbers of {self.dtype} to exchange"


def lengths(trial: Trial, n: int) -> list[Lengths]:
    """For `exchange`: short messages, and some that travel slowly, on two ranks long ones."""
    drawn = [[trial.draw.randrange(1, 50) for _ in range(n)] for _ in BOTH]
    drawn[1] = [LARGE * (n == 2) + length for length in drawn[1]]
    return [Lengths(*one, trial.new_seed(), late) for *one, late in zip(drawn, BOTH, (False, True))]


def to_exchange(case: Lengths, rank: int, n: int, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    """outgoing and incoming."""
    return case.message(rank), torch.zeros_like(case.message((rank - 1) % n))


def of_the_previous(case: Lengths, given: list, rank: int) -> torch.Tensor:
    return given[rank - 1][0].double()


def own_tensor(case: Case, rank: int, n: int, call: int) -> tuple[torch.Tensor]:
    return (case.numbers(rank, n, call),)


def the_sum(case: Case, given: list, rank: int) -> torch.Tensor:
    return sum(own.double() for (own,) in given)


SUMS = "in many shapes, small and large, float32 and float64,\n"
EXCHANGE = Contract(
    "exchange", to_exchange, of_the_previous, cases=lengths, sizes=(2, 3, 4, 5, 6), in_place=1,
    result="`incoming`", messages=exchange_messages, slack=0.0,
)
RING = Contract(
    "ring_all_reduce", own_tensor, the_sum, sizes=(*SIZES, 9), in_place=0, result="the sum",
    same_bits=True, messages=ring_messages, symptoms=SYMPTOMS, hang=BLOCKED, first=(EXCHANGE,),
    says=f"the sums of 1 to 6 and of 9 ranks {SUMS}"
    "the same bits on all, on a slow network too; every rank sends 2(N-1) messages of at most\n"
    "⌈length/N⌉ numbers, all to one neighbour; no deadlock, though every send blocks.",
)
TREE = Contract(
    "tree_all_reduce", own_tensor, the_sum, sizes=(*SIZES, 17), in_place=0, result="the sum",
    messages=tree_messages, symptoms=SYMPTOMS, hang=BLOCKED,
    says=f"the sums of 1 to 6 and of 17 ranks {SUMS}"
    "on a slow network too; no message is larger than the tensor, and at most 2·⌈log2 N⌉ "
    "follow\none another.",
)
ASYNCHRONOUS_RING = Contract(
    "asynchronous_ring_all_reduce", own_tensor, the_sum, sizes=(*SIZES, 9), in_place=0,
    result="the sum", same_bits=True, messages=asynchronous_messages, symptoms=SYMPTOMS,
    hang="Who waits for a message that nobody has started to send?",
    says=f"the sums of 1 to 6 and of 9 ranks {SUMS}"
    "the same bits on all, on a slow network too; every rank sends 2(N-1) messages of at most\n"
    "⌈length/N⌉ numbers, and receives at the same time: the ring takes as long as 2(N-1).",
)
ring, tree, asynchronous_ring = RING.judge, TREE.judge, ASYNCHRONOUS_RING.judge


def crossover(trial: Trial) -> str:
    """Judges `crossover_bytes` in the file, against the two times themselves."""
    draw = trial.draw
    sizes = [4, 3, 8, 2, *draw.sample(range(5, 200), 12), 2**29, draw.randrange(200, 10**5)]
    sizes += [2 ** draw.randrange(5, 20) + draw.choice([-1, 0, 1]) for _ in range(3)]
    sizes += draw.sample(sizes, 3)  # the same ranks, other links
    draw.shuffle(sizes)
    cases = [(n, 10 ** draw.uniform(-6, -2), 10 ** draw.uniform(-11, -7)) for n in sizes]
    for (size, alpha, beta), n in zip(
        cases, trial.alone("crossover_bytes", _crossovers, cases, seconds=5.0)
    ):
        case = f"{size} ranks, α = {alpha:.3g} s, β = {beta:.3g} s/byte"
        if isinstance(n, bool) or not isinstance(n, numbers.Real):
            raise Wrong(f"{case}: crossover_bytes returns {described(n)}, which is no number.")
        n = float(n)
        if size == 2:
            if n != math.inf:
                raise Wrong(
                    f"{case}: you say {n:g}. With two ranks the ring sends as many bytes and twice "
                    "the\nmessages: it never wins, so the answer is math.inf."
                )
            continue
        if not math.isfinite(n):
            raise Wrong(f"{case}: you say {n}; from some size on the ring sends fewer bytes.")
        tree_time, ring_time = _times(size, alpha, beta, n)
        apart = abs(tree_time - ring_time)
        if apart > 1e-6 * tree_time and apart > 2 * beta * math.log2(size) * 2:  # whole bytes pass
            raise Wrong(
                f"{case}: at your {n:g} bytes the tree takes {tree_time:.6g} s and the ring "
                f"{ring_time:.6g} s.\nThey must be equal there."
            )
    return f"at your size, tree and ring take equally long, for {len(cases)} numbers of ranks."


def _crossovers(answer, cases: list) -> list:
    return [answer.crossover_bytes(*case) for case in cases]


def _times(size: int, alpha: float, beta: float, n: float) -> tuple[float, float]:
    """Seconds of the tree and of the ring: the two formulas in the docstring of the exercise."""
    tree_time = 2 * math.ceil(math.log2(size)) * (alpha + beta * n)
    return tree_time, 2 * (size - 1) * 2 * (alpha + beta * n / size)


def show_messages(file: str, function: str, size: int, length: int) -> None:
    """Prints the messages that each rank sends for a tensor of `length` 8-byte numbers."""
    job, case = (function, own_tensor, 0), Case((length,), torch.float64, seed=1)
    try:
        results = Trial(file).on_ranks(size, observed, job, case)
    except (RankError, Wrong, SyntaxError, NotImplementedError):
        print(f"There are no messages to show yet: {file} does not run.")
        return
    for rank, (call,) in enumerate(results):
        listed = ", ".join(f"{event.payload:,} → {event.peer}" for event in call.sends) or "none"
        print(f"rank {rank} sends (bytes → rank): {listed}")
