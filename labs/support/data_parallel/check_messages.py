"""Given: what the check cells of exercises 01b, 01d and 01e look at.

1 to 6 real ranks run your file on tensors of many shapes. The sums are compared with those of
float64, and the messages and their bytes are read off with `utils.measure.traffic`.
"""

import math
import numbers

import torch
import torch.distributed as dist

from labs.support.data_parallel.longest_path import longest_path
from labs.support.data_parallel.timeline import timeline
from utils.course.expect import SLACK, Wrong, close, described, same_bits, unchanged
from utils.course.look import Look
from utils.course.noted import never_waited, noted
from utils.course.trial import SIZES, Group, Trial, fractions
from utils.ranks import RankError

EDGE = 3  # numbers beside a tensor, on either side
LARGE = 50_000  # numbers: more than any message of the small cases has
MANY = {"ring_all_reduce": 9, "asynchronous_ring_all_reduce": 9, "tree_all_reduce": 17}  # ranks
ONE_NAN, ZEROS = ", one number NaN", ", zeros on the last rank"
BLOCKED = {  # questions, by what all ranks wait in
    "send": "dist.send comes back only when the other rank has begun to receive: when all ranks "
    "send\nfirst, no one ever receives. Let one of two neighbours receive first.",
    "recv": "All ranks wait to receive, and nobody sends: who begins?",
    "": "Who sends what a waiting rank is to receive, and who receives what it sends? Does every "
    "rank\ntake part, and in the same order?",
}


def ring(trial: Trial) -> str:
    """Judges `exchange` and `ring_all_reduce` in the file."""
    name = "ring_all_reduce"
    for group in trial.groups((*SIZES, MANY[name]), hang=BLOCKED):
        if 1 < group.size <= max(SIZES):
            _right_exchanges(trial, group)
        for case, tensor_bytes, seen in _sums(trial, group, name):
            _ring_messages(case, seen, tensor_bytes)
            same_bits(case, "the sum", [rank["tensor"] for rank in seen])
    return (
        "the sums of 1 to 6 and of 9 ranks in many shapes, small and large, float32 and float64,\n"
        "the same bits on all, on a slow network too; every rank sends 2(N-1) messages of at most\n"
        "⌈length/N⌉ numbers, all to one neighbour; no deadlock, though every send blocks."
    )


def asynchronous_ring(trial: Trial) -> str:
    """Judges `asynchronous_ring_all_reduce` in the file."""
    name = "asynchronous_ring_all_reduce"
    hang = "Who waits for a message that nobody has started to send?"
    for group in trial.groups((*SIZES, MANY[name]), hang):
        steps = 2 * (group.size - 1)
        for case, tensor_bytes, seen in _sums(trial, group, name):
            _ring_messages(case, seen, tensor_bytes)
            same_bits(case, "the sum", [rank["tensor"] for rank in seen])
            taken = timeline([rank["notes"] for rank in seen])
            if taken > steps:
                raise Wrong(
                    f"{case}: the ring takes as long as {taken} messages one after another; when "
                    f"every rank sends\nand receives at the same time, it takes 2(N-1) = {steps}. "
                    "What has a rank started when it waits?"
                )
    return (
        "the sums of 1 to 6 and of 9 ranks in many shapes, small and large, float32 and float64,\n"
        "the same bits on all, on a slow network too; every rank sends 2(N-1) messages of at most\n"
        "⌈length/N⌉ numbers, and receives at the same time: the ring takes as long as 2(N-1)."
    )


def tree(trial: Trial) -> str:
    """Judges `tree_all_reduce` in the file."""
    name = "tree_all_reduce"
    for group in trial.groups((*SIZES, MANY[name]), hang=BLOCKED):
        steps = 2 * math.ceil(math.log2(group.size))
        for case, tensor_bytes, seen in _sums(trial, group, name):
            for rank, result in enumerate(seen):
                for op, _, payload in result["messages"]:
                    if op == "send" and payload > tensor_bytes:
                        raise Wrong(
                            f"{case}: rank {rank} sends a message of {payload:,} bytes, and the "
                            f"whole tensor has {tensor_bytes:,}.{_wider(result)}"
                        )
            path_length = longest_path([rank["messages"] for rank in seen])
            if path_length > steps:
                raise Wrong(
                    f"{case}: {path_length} messages follow one another, a tree has at most "
                    f"2·⌈log2 {group.size}⌉ = {steps}.\nA rank sends or receives one message at a "
                    "time: let more pairs talk at once."
                )
    return (
        "the sums of 1 to 6 and of 17 ranks in many shapes, small and large, float32 and float64,\n"
        "on a slow network too; no message is larger than the tensor, and at most 2·⌈log2 N⌉ "
        "follow\none another."
    )


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


def show_messages(file: str, function: str, size: int, length: int) -> None:
    """Prints the messages that each rank sends for a tensor of `length` 8-byte numbers."""
    try:
        results = Trial(file).on_ranks(size, _one_sum, function, (length,), torch.float64, "", 1)
    except (RankError, Wrong, SyntaxError, NotImplementedError):
        print(f"There are no messages to show yet: {file} does not run.")
        return
    for rank, result in enumerate(results):
        sends = [(peer, count) for op, peer, count in result["messages"] if op == "send"]
        listed = ", ".join(f"{count:,} → {peer}" for peer, count in sends) or "none"
        print(f"rank {rank} sends (bytes → rank): {listed}")


# ---- on a rank


def _crossovers(answer, cases: list) -> list:
    return [answer.crossover_bytes(*case) for case in cases]


def _exchange(answer, lengths: list[int], dtype: torch.dtype, seed: int) -> dict:
    """lengths: of the ranks' messages. `incoming` lies in the middle of a larger tensor."""
    rank = dist.get_rank()
    message = fractions(seed + rank, lengths[rank], dtype=dtype)
    outgoing, around = message.clone(), torch.zeros(2 * EDGE + lengths[rank - 1], dtype=dtype)
    incoming = around[EDGE : EDGE + lengths[rank - 1]]
    with Look(outgoing=outgoing) as look, noted() as notes:
        answer.exchange(outgoing, incoming)
    return {
        "incoming": around[EDGE:-EDGE], "message": message, "changed": look.changed(),
        "beside": bool(around[:EDGE].any() or around[-EDGE:].any()), "notes": notes,
        "sent": [(e.op, e.payload) for e in look.events],
    }


def _sum(answer, name: str, shape: tuple, dtype: torch.dtype, odd: str, seed: int) -> dict:
    """The answer's all-reduce of one tensor in the middle of a larger one, with its messages.

    odd: what the last rank has, ZEROS or ONE_NAN or "".
    """
    rank, edge = dist.get_rank(), fractions(seed - 1, EDGE, dtype=dtype)
    mine = fractions(seed + rank, *shape, dtype=dtype)
    if rank == dist.get_world_size() - 1 and odd:
        mine.view(-1)[mine.numel() // 2] = torch.nan
        mine = mine if odd == ONE_NAN else torch.zeros_like(mine)
    with Look() as look, noted() as notes:
        around = torch.cat([edge, mine.view(-1), edge])
        tensor = around[EDGE : EDGE + mine.numel()].view(shape)
        returned = getattr(answer, name)(tensor)
    found = around.clone()
    copied = isinstance(returned, torch.Tensor) or tensor.data_ptr() != around[EDGE:].data_ptr()
    beside = not all(part.equal(edge) for part in (found[:EDGE], found[-EDGE:]))
    del around, tensor, returned
    return {
        "tensor": found[EDGE : EDGE + mine.numel()].view(shape), "mine": mine, "notes": notes,
        "messages": [(e.op, e.peer, e.payload) for e in look.events],
        "copied": copied, "beside": beside, "look": look,
    }


def _several_sums(answer, name: str, shape: tuple, dtypes: list, seed: int) -> list[dict]:
    """Sums one after another, of one shape, and the bytes that are kept after each."""
    calls = []
    for call, dtype in enumerate(dtypes):
        seen = _sum(answer, name, shape, dtype, "", seed + 100 * call)
        calls.append(seen)
    held = 0
    for seen in calls:
        held += seen.pop("look").kept()
        seen["kept"] = held
    return calls


def _one_sum(answer, *args) -> dict:
    seen = _sum(answer, *args)
    del seen["look"]
    return seen


# ---- what is wrong, in words


def _times(size: int, alpha: float, beta: float, n: float) -> tuple[float, float]:
    """Seconds of the tree and of the ring: the two formulas in the docstring of the exercise."""
    tree_time = 2 * math.ceil(math.log2(size)) * (alpha + beta * n)
    return tree_time, 2 * (size - 1) * 2 * (alpha + beta * n / size)


def _right_exchanges(trial: Trial, group: Group) -> None:
    for dtype, late in ((torch.float32, False), (torch.float64, True)):
        lengths = [trial.draw.randrange(1, 50) for _ in range(group.size)]
        if group.size == 2 and late:
            lengths = [LARGE + length for length in lengths]
        case = group.case(f"messages of {lengths} numbers of {dtype}")
        case += ", on a slow network" * late
        seed = trial.new_seed()
        seen = group.run(f"{case}: exchange", _exchange, lengths, dtype, seed, late=late)
        for rank, result in enumerate(seen):
            where = f"{case}: exchange, rank {rank}"
            previous = (rank - 1) % group.size
            if not torch.equal(result["incoming"], seen[previous]["message"]):
                raise Wrong(
                    f"{where}: {result['incoming'].tolist()[:3]} … is in `incoming`, and rank "
                    f"{previous} has sent {seen[previous]['message'].tolist()[:3]} …"
                )
            if result["beside"]:
                raise Wrong(f"{where}: numbers beside `incoming`, in the same memory, are changed.")
            unchanged(where, result["changed"])
            _all_waited_for(where, result["notes"])
            out, back = (lengths[r] * dtype.itemsize for r in (rank, previous))
            if sorted(result["sent"]) != [("recv", back), ("send", out)]:
                raise Wrong(
                    f"{where}: it calls {result['sent']}; one send of {out} bytes and one recv of "
                    f"{back} will do.{_wider(result)}"
                )


def _all_waited_for(where: str, notes: list) -> None:
    for call in never_waited(notes):
        raise Wrong(f"{where}: nobody waits for an {call}. When may its tensor be used again?")


def _sums(trial: Trial, group: Group, name: str):
    """For several tensors: the case, the tensor's bytes, and what was seen by rank; sums right."""
    n, draw = group.size, trial.draw
    shapes = [
        (n * draw.randrange(2, 9),), (draw.randrange(n), draw.randrange(1, 5)), (),
        (n * draw.randrange(1, 40) + 1,), (draw.randrange(2, 9), draw.randrange(2, 9)), (0,),
        (draw.randrange(1, 3), draw.randrange(2, 5), draw.randrange(200, 300)),
    ]
    if n in (2, 3):
        shapes.append((n, LARGE + draw.randrange(1, 999)))
    if n > max(SIZES):  # for the formulas of ranks, not for shapes
        shapes = shapes[3:4]
    for number, shape in enumerate(shapes):
        dtype = draw.choice([torch.float32, torch.float64])
        late = number == 3 or (n == 3 and number == 7)
        odd = {4: ONE_NAN, 6: ZEROS}.get(number, "")
        case = group.case(f"a tensor of shape {shape}, {dtype}")
        case += odd + ", on a slow network" * late
        arguments = (name, shape, dtype, odd, trial.new_seed())
        seen = group.run(case, _one_sum, *arguments, late=late)
        _right_sums(case, seen)
        yield case, math.prod(shape) * dtype.itemsize, seen
    if n in (2, 3):
        shape, dtypes = (draw.randrange(300, 400),), [torch.float32, torch.float64]
        draw.shuffle(dtypes)
        case = group.case(f"tensors of shape {shape}, in turn {dtypes[0]} and {dtypes[1]}")
        runs = group.run(case, _several_sums, name, shape, 2 * dtypes, trial.new_seed())
        for call, seen in enumerate(zip(*runs), start=1):
            _right_sums(f"{case}, call {call}", seen)
        for rank, calls in enumerate(runs):
            held = [seen["kept"] for seen in calls]
            if held[1] < held[2] < held[3]:
                raise Wrong(
                    f"{case}, rank {rank}: after each call more bytes are kept, "
                    f"{', '.join(f'{count:,}' for count in held)}.\nWhat is put into a list, and "
                    "never taken out?"
                )


def _right_sums(case: str, seen: list[dict]) -> None:
    """Every rank has the sum, by sends and receives that it has waited for."""
    for rank, result in enumerate(seen):
        other = {op for op, _, _ in result["messages"]} - {"send", "recv"}
        if other:
            raise Wrong(
                f"{case}: rank {rank} calls {', '.join(sorted(other))}; build it yourself "
                "from sends and receives."
            )
    right = sum(result["mine"].double() for result in seen)
    slack = SLACK * _cancelled(right, sum(result["mine"].double().abs() for result in seen))
    for rank, result in enumerate(seen):
        where, hint = f"{case}, rank {rank}", _why(rank, seen, right)
        close(where, "the sum", result["tensor"], right, hint=hint, slack=slack)
        if result["beside"]:
            raise Wrong(f"{where}: numbers beside the tensor, in the same memory, are changed.")
        _all_waited_for(where, result["notes"])


def _wider(result: dict) -> str:
    """A question, where numbers have travelled that are wider than those of the tensor."""
    own = result["tensor" if "tensor" in result else "message"].dtype
    dtypes = {note.dtype for note in result["notes"] if note.name == "isend"}
    wide = [str(dtype) for dtype in dtypes if dtype.itemsize > own.itemsize]
    return f"\n{' and '.join(wide)} numbers travel for a tensor of {own}: why?" if wide else ""


def _cancelled(right: torch.Tensor, terms: torch.Tensor) -> float:
    """How much larger the terms are than their sum: roundings are those of the terms."""
    finite = right.isfinite() & (right != 0)
    return (terms[finite].max() / right[finite].abs().max()).item() if finite.any() else 1.0


def _why(rank: int, seen: list[dict], right: torch.Tensor) -> str:
    """What a wrong sum on this rank looks like."""
    got, mine = seen[rank]["tensor"], seen[rank]["mine"]
    have = [
        r for r, other in enumerate(seen)
        if torch.allclose(other["tensor"].double(), right, equal_nan=True)
    ]
    if have and rank not in have:
        return f"Ranks {have} have the sum: who sends it to rank {rank}?"
    if got.equal(mine):
        hint = f"The tensor on rank {rank} is as it was"
        return hint + (": change it in place, not a copy." if seen[rank]["copied"] else ".")
    places = (got == mine).flatten().nonzero().flatten().tolist()[:8]
    if not places:
        return "Which part does each rank send in each step? Print the part's number and rank."
    odd = "\nLengths that N does not divide need parts of different lengths."
    return f"Places {places} still hold rank {rank}'s own numbers: which part has them?" + (
        odd if right.numel() % len(seen) else ""
    )


def _ring_messages(case: str, seen: list[dict], tensor_bytes: int) -> None:
    size, itemsize = len(seen), seen[0]["tensor"].element_size()
    part = math.ceil(tensor_bytes / itemsize / size) * itemsize
    for rank, result in enumerate(seen):
        sends = [(peer, payload) for op, peer, payload in result["messages"] if op == "send"]
        largest = max((payload for _, payload in sends), default=0)
        if largest > part:
            wider = _wider(result)
            whole = ", the whole tensor," if largest == tensor_bytes and not wider else ""
            parts = "\nCut the tensor into N parts, and send one part at a time."
            raise Wrong(
                f"{case}: rank {rank} sends a message of {largest} bytes{whole} where a "
                f"ring sends at most {part}: one part of N.{wider or parts}"
            )
        if len({peer for peer, _ in sends}) > 1:
            raise Wrong(
                f"{case}: rank {rank} sends to ranks {sorted({p for p, _ in sends})}; in a "
                "ring it sends to one neighbour only."
            )
        full = tensor_bytes >= itemsize * size  # else some parts are empty, and need not be sent
        if len(sends) > 2 * (size - 1) or (full and len(sends) < 2 * (size - 1)):
            raise Wrong(
                f"{case}: rank {rank} sends {len(sends)} messages where a ring sends "
                f"2(N-1) = {2 * (size - 1)}: N-1 that add and N-1 that copy."
            )
