"""Given: what the check cell of exercise d looks at, on 1 to 6 real ranks.

They share every matrix (tensor parallel), the rows (data parallel), or both. Loss and gradient must
be one rank's on all of them, and no message is made that nobody needs.
"""

from dataclasses import replace
from fractions import Fraction

import torch

from labs.support.prompt_tuning import scenarios
from labs.support.prompt_tuning.check_forward import LIBRARY, same
from labs.support.prompt_tuning.reference import (
    TYPES,
    Case,
    Spelled,
    draw_case,
    draw_config,
    draw_lengths,
    near,
    right_loss,
)
from utils.course.assertions import Wrong, close, forbid, same_bits
from utils.course.runner import Group, Trial

HANG = "Does every rank call the same collectives, each on the axis's own group?"
MOST = 3  # messages over dp: the number of tokens, the gradient, the loss
SMALL = 8  # bytes of a single number, at most
LOSS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1.5e-3}


def ranks(trial: Trial) -> str:
    """Judges `backward`."""
    forbid(trial.path, LIBRARY)
    for group in trial.groups(hang=HANG):
        for jobs, late in _runs(trial, group.size):
            _judge(group, jobs, late)
    return (
        "tensor-parallel ranks all have one rank's gradient, without a message of yours;\n"
        "data-parallel ranks add theirs up, in answers of unequal length, also where a rank has\n"
        "none: one rank's again, bit by bit the same on all; on 1 to 6 ranks, in fp64, fp32 and\n"
        "bf16, with late messages; three messages over dp at most, and nothing is kept."
    )


def _runs(trial: Trial, size: int) -> list[tuple[list[tuple], bool]]:
    """(meshes with their cases, whether messages come late) of each run; with few ranks in all
    types, the more ranks, the fewer meshes."""
    meshes = {
        4: [(2, 2)],
        5: [trial.draw.choice([(5, 1), (1, 5)])],
        6: [trial.draw.choice([(3, 2), (2, 3)])],
    }.get(size, [(size, 1), (1, size)][: size])
    if size not in (2, 3):
        dtype = trial.draw.choice(TYPES[:2])
        return [([(mesh, [_case(trial, mesh, dtype)]) for mesh in meshes], False)]
    late = [(mesh, [_case(trial, mesh, torch.float64)]) for mesh in meshes]
    more = [
        (mesh, [_case(trial, mesh, torch.float32)] + [_many(trial, mesh)] * (size == 2))
        for mesh in meshes
    ]
    return [(late, True), (more, False)]


def _case(trial: Trial, sizes: tuple[int, int], dtype: torch.dtype) -> list[Case]:
    """For each rank of dp its rows, in which answers have other lengths; on one none may count."""
    draw, (dp, tp) = trial.draw, sizes
    whole = draw_case(trial, dtype, config=draw_config(trial, ranks=tp), frozen=True)
    lengths = [draw_lengths(trial, draw.randrange(1, 5), most=3 + 2 * rank) for rank in range(dp)]
    silent = draw.randrange(dp) if dp > 1 and dtype == torch.float64 else None
    return [_of_rank(whole, rank, some, rank == silent) for rank, some in enumerate(lengths)]


def _of_rank(whole: Case, rank: int, lengths: tuple, silent: bool = False) -> Case:
    """The same model and prompt, other rows."""
    return replace(whole, lengths=lengths, task=(rank,), silent=silent)


def _many(trial: Trial, sizes: tuple[int, int]) -> list[Case]:
    """In bf16, with an odd number of tokens above 256: bf16 does not count so far."""
    draw, (dp, tp) = trial.draw, sizes
    whole = draw_case(trial, torch.bfloat16, config=draw_config(trial, ranks=tp), frozen=True)
    left, lengths = draw.randrange(257, 280, 2), [[] for _ in range(dp)]
    while left:
        count = min(left, draw.randrange(2, 40))
        lengths[len(lengths[0]) % dp].append((draw.randrange(1, 4), count - 1))
        left -= count
    return [_of_rank(whole, rank, tuple(some)) for rank, some in enumerate(lengths)]


def _judge(group: Group, jobs: list[tuple], late: bool) -> None:
    meshes = " and ".join(f"dp {dp} · tp {tp}" for (dp, tp), _ in jobs)
    case = group.case(meshes + ", late messages" * late)
    found = group.run(case, scenarios.backward, jobs, late=late)
    for number, (sizes, cases) in enumerate(jobs):
        for index, some in enumerate(cases):
            right = _alone(some)
            by_rank = [results[number][index] for results in found]
            for rank, result in enumerate(by_rank):
                _right(result, right, by_rank, sizes, some, rank)
            same_bits(
                f"{case}, {some[0]}", "prompt.grad", [result["gradient"] for result in by_rank],
                "Every rank makes the same step with it.",
            )


def _alone(cases: list[Case]) -> dict:
    """One rank with all rows, in fp64."""
    spelled = Spelled(cases[0].model(), cases[0].prompt())
    total, count = 0, 0
    for case in cases:
        tokens, targets = case.rows()
        if counting := int((targets != scenarios.IGNORED).sum()):
            total = total + right_loss(spelled.logits(tokens), targets) * counting
            count += counting
    (total / count).backward()
    return {"loss": (total / count).item(), "gradient": spelled.gradients()[0], "count": count}


def _right(result: dict, right: dict, by_rank: list, sizes: tuple, cases: list, rank: int) -> None:
    where, gradient, dtype = result["where"], result["gradient"], cases[0].dtype
    (dp, tp), loss, own = sizes, result["loss"], result["own"]
    if gradient is None:
        raise Wrong(f"{where}: prompt.grad is None after backward.")
    close(where, "prompt.grad", gradient, right["gradient"], dtype=dtype, slack=near(dtype),
          hint=_why(result, right, dp, tp))
    # in bf16 the model's own rounding is larger than what a wrong number of tokens would do
    firsts = by_rank[::tp]
    wanted = sum(one["own"]["loss"] for one in firsts) / right["count"]
    if dtype != torch.bfloat16:
        wanted = right["loss"]
    if not abs(loss - wanted) <= LOSS[dtype] * max(1, abs(wanted)):
        hint = "The loss of all rows is the sum over all tokens that count, by their number."
        if result["count"] and abs(loss - own["loss"] / result["count"]) < 1e-5 * abs(loss):
            hint = "It is the mean over this rank's own rows."
        raise Wrong(
            f"{where}: the gradient is right, and the loss is {loss:.6g}, where {wanted:.6g} is "
            f"right, of {right['count']} tokens.\n{hint}"
        )
    _right_messages(result, own["messages"], dp, right["gradient"].numel(), dtype)
    if result["kept"]:
        raise Wrong(
            f"{where}: when it is over, {result['kept']:,} bytes that it made are still held, "
            "besides prompt.grad.\nWho remembers them, and what for?"
        )


def _right_messages(result: dict, model: list, dp: int, numbers: int, dtype) -> None:
    value = max(4, dtype.itemsize)  # who adds up bf16 in fp32 is right
    most = MOST * (dp > 1)
    bytes_ = (numbers * value + 2 * SMALL) * (dp > 1)
    more = result["all"] - len(model)
    payload = sum(size for _, size in result["dp"] + result["tp"]) - sum(size for _, size in model)
    sent = sum(_sent(op, size, dp) for op, size in result["dp"])
    elsewhere = result["all"] - len(result["dp"]) - len(result["tp"])
    if elsewhere:
        raise Wrong(
            f"{result['where']}: right, with {elsewhere} messages among other ranks than "
            "those of dp or of tp.\nWhose group is it?"
        )
    if sorted(result["tp"]) != model or more > most or sent > _sent("all_reduce", bytes_, dp):
        raise Wrong(
            f"{result['where']}: right, with {more} messages of {payload:,} bytes besides the "
            f"model's own; {most} of {bytes_:,} bytes will do, over dp."
        )


def _sent(op: str, size: int, ranks: int) -> Fraction:
    """Bytes that a rank sends at most."""
    factor = {"all_reduce": Fraction(2 * (ranks - 1), ranks), "all_gather": ranks - 1}
    return size * Fraction(factor.get(op, 1))


def _why(result: dict, right: dict, dp: int, tp: int) -> str:
    gradient, wanted, own = result["gradient"], right["gradient"], result["own"]["gradient"]
    if tp > 1 and same(gradient, tp * wanted):
        return (
            f"It is {tp} times that: added up over tp. The model's own all-reduces (f, lab 06) "
            "have already\nmade the gradient whole on each of the ranks that share the matrices."
        )
    if tp > 1 and same(gradient, wanted / tp):
        return f"It is 1/{tp} of it: the same rows are on all ranks of tp, and they count once."
    if dp == 1:
        return "All tp ranks have the same rows and the whole prompt: each has all it needs."
    counts = result["count"]
    if counts and (same(gradient, own / counts) or same(gradient, own / right["count"])):
        return "It is that of this rank's own rows: who adds up those of the others?"
    if same(gradient, wanted / dp):
        return f"It is 1/{dp} of it: the sum over the ranks was divided once more."
    return (
        f"This rank has {counts} tokens that count, all have {right['count']}. The mean of two "
        "means\nis not the mean: divide each sum of losses by the tokens of all."
    )
