"""Given: what the check cells of exercises 01b and 01d look at.

Each judge lets 1, 2, 3 and 4 real ranks run your file, compares the sums, and reads off the
messages and their bytes with `utils.measure.traffic`.
"""

import math
from pathlib import Path

import torch
import torch.distributed as dist

from labs.support.data_parallel.longest_path import longest_path
from utils.course.checks import Wrong, on_ranks
from utils.measure.traffic import Traffic
from utils.ranks import RankError

RANKS = (1, 2, 3, 4)
SHAPES = [(12,), (5,), (100,), (3, 7), (2,), (), (0,)]
BLOCKED = (
    "dist.send comes back only when the other rank has begun to receive: when all ranks send\n"
    "first, no one ever receives. Let one of two neighbours receive first."
)


def ring(path: Path) -> str:
    """Judges `exchange` and `ring_all_reduce` in the file."""
    for rank, received in enumerate(on_ranks(2, path, _exchange_once, hang=BLOCKED)):
        if received != [1.0 - rank] * 3:
            raise Wrong(
                f"exchange: with 2 ranks, rank {rank} has {received} in `incoming`; "
                f"rank {1 - rank} has sent {[1.0 - rank] * 3}."
            )
    for size in RANKS:
        for shape, ranks in zip(SHAPES, _sums(size, path, "ring_all_reduce")):
            case = f"with {size} rank{'s' * (size > 1)} and a tensor of shape {shape}"
            _only_messages(ranks, case)
            _ring_messages(ranks, size, math.prod(shape) * 8, case)
            _right_sum(ranks, size, case)
    return (
        f"exact sums on 1, 2, 3 and 4 ranks, {len(SHAPES)} shapes each;\n"
        "every rank sends 2(N-1) messages of at most ⌈length/N⌉ numbers, all to one neighbour;\n"
        "no deadlock, though every send blocks."
    )


def tree(path: Path) -> str:
    """Judges `tree_all_reduce` in the file."""
    for size in RANKS:
        steps = 2 * math.ceil(math.log2(size))
        for shape, ranks in zip(SHAPES, _sums(size, path, "tree_all_reduce")):
            case = f"with {size} rank{'s' * (size > 1)} and a tensor of shape {shape}"
            _only_messages(ranks, case)
            _right_sum(ranks, size, case)
            path_length = longest_path([rank["messages"] for rank in ranks])
            if path_length > steps:
                raise Wrong(
                    f"{case}: {path_length} messages follow one another, a tree has at most "
                    f"2·⌈log2 {size}⌉ = {steps}.\nA rank sends or receives one message at a time: "
                    "let more pairs talk at once."
                )
    return "exact sums on 1, 2, 3 and 4 ranks; at most 2·⌈log2 N⌉ messages follow one another."


def crossover(path: Path) -> str:
    """Judges `crossover_bytes` in the file, against the two times themselves."""
    cases = [(4, 3e-3, 2e-8), (3, 1e-4, 1e-9), (8, 5e-6, 1e-10), (2, 1e-3, 1e-8), (64, 1e-5, 1e-9)]
    for (size, alpha, beta), n in zip(cases, on_ranks(1, path, _crossovers, cases)[0]):
        case = f"{size} ranks, α = {alpha:g} s, β = {beta:g} s/byte"
        if not isinstance(n, int | float):
            raise Wrong(f"{case}: crossover_bytes returns {n!r}, which is no number.")
        if size == 2 and not (isinstance(n, float) and n == math.inf):
            raise Wrong(
                f"{case}: you say {n}. With two ranks the ring sends as many bytes and twice the\n"
                "messages: it never wins, so the answer is math.inf."
            )
        tree_time, ring_time = _times(size, alpha, beta, n if math.isfinite(n) else 1e30)
        if size > 2 and not math.isclose(tree_time, ring_time, rel_tol=1e-6):
            raise Wrong(
                f"{case}: at your {n:g} bytes the tree takes {tree_time:.4g} s and the ring "
                f"{ring_time:.4g} s.\nThey must be equal there."
            )
    return "at your size, tree and ring take equally long, on 3, 4, 8 and 64 ranks."


def show_messages(file: str, function: str, size: int, length: int) -> None:
    """Prints the messages that each rank sends for a tensor of `length` 8-byte numbers."""
    try:
        results = on_ranks(size, Path(file).resolve(), _sum_shapes, function, [(length,)])
    except (RankError, Wrong, SyntaxError):
        print(f"There are no messages to show yet: {file} does not run.")
        return
    for rank, (result,) in enumerate(results):
        sends = [(peer, count) for op, peer, count in result["messages"] if op == "send"]
        listed = ", ".join(f"{count:,} → {peer}" for peer, count in sends) or "none"
        print(f"rank {rank} sends (bytes → rank): {listed}")


def _crossovers(answer, cases: list) -> list[float]:
    return [answer.crossover_bytes(*case) for case in cases]


def _times(size: int, alpha: float, beta: float, n: float) -> tuple[float, float]:
    """Seconds of the tree and of the ring: the two formulas in the docstring of the exercise."""
    tree_time = 2 * math.ceil(math.log2(size)) * (alpha + beta * n)
    return tree_time, 2 * (size - 1) * 2 * (alpha + beta * n / size)


def _sums(size: int, path: Path, name: str) -> list[list[dict]]:
    """For each shape the results of all ranks."""
    ranks = on_ranks(size, path, _sum_shapes, name, SHAPES, hang=BLOCKED)
    return [[results[index] for results in ranks] for index in range(len(SHAPES))]


def _exchange_once(answer) -> list[float]:
    """On a rank: sends three times its own number, returns what it got."""
    incoming = torch.full((3,), -1.0)
    answer.exchange(torch.full((3,), float(dist.get_rank())), incoming)
    return incoming.tolist()


def _sum_shapes(answer, name: str, shapes: list) -> list[dict]:
    """On a rank: the answer's all-reduce of each shape, with its messages."""
    results = []
    for shape in shapes:
        length = math.prod(shape)
        mine = (dist.get_rank() + 1.0) * torch.arange(1, length + 1, dtype=torch.float64)
        tensor = mine.clone().view(shape)
        with Traffic() as traffic:
            returned = getattr(answer, name)(tensor)
        messages = [(e.op, e.peer, e.payload) for e in traffic.events]
        results.append({"sum": tensor.flatten(), "messages": messages, "mine": mine})
        results[-1]["returned"] = returned is not None and returned is not tensor
    return results


def _only_messages(ranks: list[dict], case: str) -> None:
    for rank, result in enumerate(ranks):
        other = {op for op, _, _ in result["messages"]} - {"send", "recv"}
        if other:
            raise Wrong(
                f"{case}: rank {rank} calls {', '.join(sorted(other))}; build it yourself "
                "from dist.send and dist.recv."
            )


def _ring_messages(ranks: list[dict], size: int, tensor_bytes: int, case: str) -> None:
    part = math.ceil(tensor_bytes / 8 / size) * 8
    for rank, result in enumerate(ranks):
        sends = [(peer, payload) for op, peer, payload in result["messages"] if op == "send"]
        largest = max((payload for _, payload in sends), default=0)
        if largest > part:
            whole = ", the whole tensor," if largest == tensor_bytes else ""
            raise Wrong(
                f"{case}: rank {rank} sends a message of {largest} bytes{whole} where a "
                f"ring sends at most {part}:\none part of N. Cut the tensor into N parts, "
                "and send one part at a time."
            )
        if len({peer for peer, _ in sends}) > 1:
            raise Wrong(
                f"{case}: rank {rank} sends to ranks {sorted({p for p, _ in sends})}; in a "
                "ring it sends to one neighbour only."
            )
        full = tensor_bytes >= 8 * size  # else some parts are empty, and need not be sent
        if len(sends) > 2 * (size - 1) or (full and len(sends) < 2 * (size - 1)):
            raise Wrong(
                f"{case}: rank {rank} sends {len(sends)} messages where a ring sends "
                f"2(N-1) = {2 * (size - 1)}: N-1 that add and N-1 that copy."
            )


def _right_sum(ranks: list[dict], size: int, case: str) -> None:
    expected = sum(range(1, size + 1)) * ranks[0]["mine"]
    wrong = [rank for rank, result in enumerate(ranks) if not result["sum"].equal(expected)]
    if not wrong:
        return
    rank = wrong[0]
    got, mine = ranks[rank]["sum"], ranks[rank]["mine"]
    bad = (got != expected).nonzero().flatten()
    where = f"{case}: rank {rank} has {got[bad[0]]:g} at place {bad[0]}, the sum is "
    where += f"{expected[bad[0]]:g}"
    if len(wrong) < size:
        right = sorted(set(range(size)) - set(wrong))
        hint = f"Ranks {right} have the sum: who sends it to ranks {wrong}?"
    elif got.equal(mine):
        hint = f"The tensor on rank {rank} is as it was"
        hint += ": change it in place, not a copy." if ranks[rank]["returned"] else "."
    elif len(bad) < len(got) and bool((got[bad] == mine[bad]).all()):
        hint = f"Places {bad.tolist()[:8]} still hold rank {rank}'s own numbers: which part has "
        hint += "them?\nLengths that N does not divide need parts of different lengths."
    else:
        hint = "Which part does each rank send in each step? Print the part's number and rank."
    raise Wrong(f"{where}.\n{hint}")
