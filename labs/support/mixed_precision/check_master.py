"""Given: what the check cell of exercise 03b looks at.

1, 2 and 3 ranks train a small bf16 network for some steps of three micro-batches. Masters,
parameters, messages and what is left in memory are compared with a plain fp32 reckoning.
"""

from pathlib import Path

import torch
import torch.distributed as dist

from utils.course.checks import Wrong, on_ranks
from utils.measure.traffic import Traffic

SIZES = (1, 2, 3)
STEPS, MICRO, ROWS, WIDTHS, LR = 6, 3, 12, (5, 16, 3), 0.02
HANG = "Does every rank call the same collectives?"


def master_weights(path: Path) -> str:
    """Judges the MasterWeights in the file."""
    for size in SIZES:
        for rank, (mine, right) in enumerate(on_ranks(size, path, _train_both, hang=HANG)):
            _right(mine, right, size, f"with {size} rank(s), rank {rank}")
    return (
        "masters and parameters equal a plain fp32 reckoning on 1, 2 and 3 ranks;\n"
        "micro-batches are added up in fp32, and averaged in one fp32 message a step;\n"
        "the model stays bf16, and no gradient outlives its step."
    )


def _network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    inputs, hidden, outputs = WIDTHS
    layers = torch.nn.Linear(inputs, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, outputs)
    return torch.nn.Sequential(*layers).bfloat16()


def _backward(model, step: int, micro: int) -> None:
    """The gradients of one micro-batch of this rank."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x = torch.randn(ROWS, WIDTHS[0], generator=generator).bfloat16()
    y = torch.randn(ROWS, WIDTHS[-1], generator=generator)
    ((model(x).float() - y).square().mean() / MICRO).backward()


def _make(masters) -> torch.optim.Optimizer:
    return torch.optim.SGD(masters, lr=LR, momentum=0.9)


def _train_both(answer) -> tuple[dict, dict]:
    right = _train_right()
    model = _network()
    optimizer = answer.MasterWeights(model.parameters(), _make)
    masters = optimizer.masters
    mine = {
        "dtypes": [master.dtype for master in masters],
        "shapes": [master.shape for master in masters],
        "steps": [],
    }
    for step in range(STEPS):
        row = {"left": []}
        for micro in range(MICRO):
            _backward(model, step, micro)
            optimizer.collect()
            row["left"] += [n for n, p in model.named_parameters() if p.grad is not None]
        row["sums"] = [None if m.grad is None else m.grad.clone() for m in masters]
        with Traffic() as traffic:
            optimizer.step()
        row["messages"] = [(event.op, event.payload) for event in traffic.events]
        row["masters"] = [master.detach().clone() for master in masters]
        row["dtypes"] = sorted({str(p.dtype).split(".")[1] for p in model.parameters()})
        row["parameters"] = [p.detach().clone() for p in model.parameters()]
        row["uncleared"] = [i for i, m in enumerate(masters) if m.grad is not None and m.grad.any()]
        mine["steps"].append(row)
        if row["dtypes"] != ["bfloat16"]:
            break  # its next forward pass would fail
    return mine, right


def _train_right() -> dict:
    """The same training, reckoned by the judge."""
    model = _network()
    start = [p.detach().float() for p in model.parameters()]
    masters = [value.clone() for value in start]
    optimizer = _make(masters)
    rows = []
    for step in range(STEPS):
        parts = []  # of each micro-batch: the bf16 gradients
        for micro in range(MICRO):
            _backward(model, step, micro)
            parts.append([p.grad for p in model.parameters()])
            model.zero_grad()
        sums = [sum(part.float() for part in column) for column in zip(*parts)]
        small = [(a + b + c).float() for a, b, c in zip(*parts)]  # added up in bf16
        for master, gradient in zip(masters, sums):
            master.grad = gradient.clone()
            dist.all_reduce(master.grad)
            master.grad /= dist.get_world_size()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters):
                parameter.copy_(master)
        last = [part.float() for part in parts[-1]]
        rows.append({"sums": sums, "small": small, "last": last})
        rows[-1]["masters"] = [master.clone() for master in masters]
    return {"start": start, "steps": rows}


def _right(mine: dict, right: dict, size: int, case: str) -> None:
    shapes = [value.shape for value in right["start"]]
    if mine["shapes"] != shapes:
        raise Wrong(f"{case}: {len(mine['shapes'])} masters of {len(shapes)} parameters' shapes.")
    wrong = {str(dtype).split(".")[1] for dtype in mine["dtypes"]} - {"float32"}
    if wrong:
        raise Wrong(f"{case}: the masters are {' and '.join(sorted(wrong))}, not float32.")
    previous = right["start"]
    for number, (my, true) in enumerate(zip(mine["steps"], right["steps"]), start=1):
        where = f"{case}, step {number}"
        if my["left"]:
            raise Wrong(
                f"{where}: .grad of {my['left'][0]} is not None after collect(): "
                "it takes memory, and is counted again."
            )
        _right_sums(my, true, where)
        _right_messages(my["messages"], sum(value.numel() for value in previous), where)
        _right_masters(my, true, previous, size, where, number)
        _right_parameters(my, right["start"], where)
        previous = true["masters"]


def _close(values, others) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(values, others))


def _right_sums(my: dict, true: dict, where: str) -> None:
    if any(gradient is None for gradient in my["sums"]):
        raise Wrong(f"{where}: after collect() a master has no .grad.")
    if _close(my["sums"], true["sums"]):
        return
    if _close(my["sums"], true["last"]):
        hint = "They hold only the last micro-batch: add up, do not overwrite."
    elif _close(my["sums"], true["small"]):
        hint = "They were added up in bf16: turn each part into fp32 before you add it."
    else:
        hint = "Is each micro-batch added once, and nothing left of the step before?"
    raise Wrong(f"{where}: the masters' gradients are not the sum of the micro-batches'.\n{hint}")


def _right_messages(messages: list, count: int, where: str) -> None:
    if not messages:
        raise Wrong(f"{where}: step() calls no all-reduce: each rank follows its own rows.")
    if len(messages) > 1:
        raise Wrong(
            f"{where}: step() sends {len(messages)} messages. One message, of all gradients "
            "in one flat tensor, saves their latencies."
        )
    op, payload = messages[0]
    if payload != 4 * count:
        raise Wrong(
            f"{where}: the {op} has {payload} bytes, and {count} fp32 gradients have {4 * count}.\n"
            "In bf16 the sum over the ranks is rounded at each addition."
        )


def _right_masters(my, true, previous, size, where, number) -> None:
    if _close(my["masters"], true["masters"]):
        return
    moved = torch.cat([(a - b).view(-1) for a, b in zip(my["masters"], previous)])
    should = torch.cat([(a - b).view(-1) for a, b in zip(true["masters"], previous)])
    if not moved.any():
        hint = "They have not moved: does step() call the optimizer's step()?"
    elif size > 1 and number == 1 and torch.allclose(moved, size * should, rtol=1e-2, atol=1e-6):
        hint = f"They move {size} times too far: the sum is not divided by the ranks."
    elif number > 1:
        hint = (
            "The step before was right. The masters are kept for the whole training: what bf16 "
            "rounds away\nmust not be read back from the parameters. And is every .grad new?"
        )
    else:
        hint = "Does the optimizer see the mean of all ranks' gradients?"
    raise Wrong(f"{where}: the masters are not those of fp32 training.\n{hint}")


def _right_parameters(my: dict, start: list, where: str) -> None:
    if my["dtypes"] != ["bfloat16"]:
        raise Wrong(f"{where}: the model's parameters are {' and '.join(my['dtypes'])}, not bf16.")
    rounded = [master.bfloat16() for master in my["masters"]]
    if not all(torch.equal(p, r) for p, r in zip(my["parameters"], rounded)):
        unmoved = all(torch.equal(p, s.bfloat16()) for p, s in zip(my["parameters"], start))
        raise Wrong(
            f"{where}: the model's parameters are not the rounded masters"
            + ("; they are still those of the beginning." if unmoved else ".")
        )
    if my["uncleared"]:
        raise Wrong(
            f"{where}: after step() masters still have a .grad: "
            "the next step would begin with this step's gradients."
        )
