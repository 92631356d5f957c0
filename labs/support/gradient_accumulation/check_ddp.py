"""Given: what the check cell of exercise 02b looks at.

Ranks make steps with your `train_step`. The gradient that the optimizer sees must be that of one
rank with the whole batch, clipped; all ranks must hold the same model, and DDP must have
all-reduced once.
"""

import copy
import math

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from labs.support.gradient_accumulation import tiny_model
from labs.support.gradient_accumulation.cases import (
    Part,
    alike,
    draw_case,
    flat,
    memory_in,
    parallel,
    right_memory,
    some,
)
from labs.support.gradient_accumulation.cases import parts as parts_of
from utils.course.assertions import Wrong, a_number, close, described, same_bits, unchanged
from utils.course.observe import Look
from utils.course.runner import Trial

HANG = "Does every rank make the same calls, also for an empty micro-batch?"
SMALL = 16  # bytes: what a count or a loss may need


def ddp(trial: Trial) -> str:
    """Judges `tokens_of_all`, `backward` and `train_step` in the file."""
    for group in trial.groups(hang=HANG):
        counts = [trial.draw.randrange(2**23, 2**24) * 2 + 1] + [2] * (group.size - 1)
        case = group.case(f"{sum(counts):,} tokens")
        for rank, seen in enumerate(group.run(case, _count, counts, late=True)):
            _right_tokens(f"{case}, rank {rank}", *seen, sum(counts))
        for dtype, late in some(trial, group.size, torch.float64, torch.float32):
            drawn = draw_case(trial, group.size, dtype, equally_many=True)
            norms = [math.inf, trial.draw.uniform(0.01, 0.04), trial.draw.uniform(20, 30)]
            norms.append(trial.draw.uniform(0.01, 0.04))  # below and above those of these gradients
            momentum = trial.draw.choice((0.0, 0.9))
            case = group.case(str(drawn))
            ranks = group.run(case, _train, drawn, norms, momentum, late=late)
            _right_training(case, ranks, drawn, norms)
    return (
        "steps equal one rank's with the whole batch, on 1 to 6 ranks, in fp32 and fp64, also\n"
        "clipped; one all-reduce of the gradients a step, for any number of micro-batches, and\n"
        "two of one number; the activations of one micro-batch at a time; one model on all ranks."
    )


def _count(answer, counts: list[int]) -> tuple[float, list]:
    """On a rank: tokens_of_all where this rank has so many tokens, in memory for one."""
    one, padding = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), tiny_model.IGNORE)
    batches = [y.expand(1, n) for y, n in ((one, counts[dist.get_rank()]), (padding, 5))]
    with Look() as look:
        found = answer.tokens_of_all([(y, y) for y in batches])
    events = [(event.op, event.payload) for event in look.events]
    return a_number("tokens_of_all", "the result", found), events


def _train(answer, drawn, norms: list[float], momentum: float) -> list[dict]:
    """On a rank: `backward` alone, then the steps, and beside each what is right for this share."""
    rank, rows = dist.get_rank(), []
    model = DDP(drawn.new_model(), bucket_cap_mb=100)
    for _ in range(2):  # DDP agrees on the order of its buckets once: not to be counted
        tiny_model.loss_sum(model, *drawn.share(2, 0)[0]).backward()
        model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=drawn.lr, momentum=momentum)
    twin = copy.deepcopy(model.module)  # makes the same steps with the gradients that are seen
    same = torch.optim.SGD(twin.parameters(), lr=drawn.lr, momentum=momentum)
    seen, whole = [], Look()
    hook = optimizer.register_step_pre_hook(lambda *_: seen.append(_gradients(model)))
    rows.append(_backward(answer, model, drawn, rank))
    for step, max_norm in enumerate(norms):
        where = f"step {step + 1}"
        share = drawn.share(step, rank)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        row = {"parts": parts_of(model.module, share)}
        row["right memory"] = right_memory(model.module, share)
        given = list(share)
        look = Look(tokens=[x for x, _ in share], targets=[y for _, y in share])
        with whole, look, memory_in(model.module, look) as memory:
            loss = answer.train_step(model, share, optimizer, max_norm)
        if len(share) != len(given) or any(a is not b for a, b in zip(share, given)):
            raise Wrong(f"{where}: the caller's list of micro-batches is not what it was.")
        unchanged(where, look.changed())
        if loss is None:
            raise Wrong(f"{where}: train_step returns nothing; the mean loss is asked for.")
        if len(seen) != 1:
            raise Wrong(
                f"{where}: train_step makes {len(seen)} optimizer steps. One is right, after all "
                "micro-batches."
            )
        row["grad"] = seen.pop()
        _give(twin, row["grad"])
        same.step()
        row |= {
            "loss": a_number(where, "what train_step returns", loss),
            "events": [(event.op, event.payload) for event in look.events],
            "weights": flat(model.parameters()), "twin": flat(twin.parameters()),
            "left": bool(_gradients(model).any()), "memory": memory[0],
        }
        rows.append(row)
        del loss, look, share, given
    hook.remove()
    ours = [p.grad for p in model.parameters()] + [row["grad"] for row in rows]
    rows[-1]["kept"] = whole.kept(ours, list(optimizer.state.values()))
    if rank == drawn.odd:
        model.module[0].weight.data.fill_(math.nan)
    found = answer.train_step(model, drawn.share(0, rank), optimizer, 1.0)
    rows[-1]["nan"] = a_number("one rank has a NaN", "what train_step returns", found)
    return rows


def _backward(answer, model, drawn, rank: int) -> dict:
    """`backward` by itself, with the micro-batches of step 3."""
    share = drawn.share(2, rank)
    row = {"parts": parts_of(model.module, share)}
    tokens = torch.tensor(sum(part.tokens for part in row["parts"]))
    dist.all_reduce(tokens)
    with Look() as look:
        total = answer.backward(model, share, tokens.item())
    if not isinstance(total, torch.Tensor) or total.dtype != torch.float64 or total.shape:
        raise Wrong(
            f"backward returns {described(total)}; the sum of the losses is asked for, in a 0-D "
            "float64 tensor."
        )
    if total.requires_grad:
        raise Wrong(
            "backward returns a tensor with a graph, which keeps memory: detach what you add up."
        )
    row |= {"total": total.item(), "grad": _gradients(model)}
    row["events"] = [(event.op, event.payload) for event in look.events]
    model.zero_grad()
    return row


def _gradients(model) -> torch.Tensor:
    """All `.grad` in one, zeros where there is none."""
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def _give(model, grad: torch.Tensor) -> None:
    """Puts a 1-D tensor of all gradients into `.grad`."""
    parameters = list(model.parameters())
    for parameter, piece in zip(parameters, grad.split([p.numel() for p in parameters])):
        parameter.grad = piece.view_as(parameter).clone()


def _right_tokens(where: str, seen: float, events: list, right: int) -> None:
    if seen != right:
        raise Wrong(
            f"{where}: tokens_of_all returns {seen:,.0f}, but {right:,} tokens count on all ranks "
            "together."
        )
    if [op for op, _ in events] not in ([], ["all_reduce"]) or sum(n for _, n in events) > 8:
        raise Wrong(
            f"{where}: tokens_of_all calls {', '.join(op for op, _ in events)} with "
            f"{sum(n for _, n in events)} bytes;\none all-reduce of one number is enough."
        )


def _right_training(case: str, ranks: list[list[dict]], drawn, norms: list[float]) -> None:
    for step, rows in enumerate(zip(*ranks)):
        after = f"step {step}" if step else "backward alone"
        wheres = [f"{case}, rank {rank}, {after}" for rank in range(len(rows))]
        every = [part for row in rows for part in row["parts"]]
        for where, row in zip(wheres, rows):
            _right_messages(where, row["events"], row["grad"].nbytes, 2 if step else 0, len(rows))
        for row in rows[1:]:
            _one_model(case, after, rows[0]["grad"], row["grad"])
        for where, row in zip(wheres, rows):
            _right_gradient(where, row, every, drawn.dtype, norms[step - 1] if step else math.inf,
                            len(rows))
            if step:
                _right_step(where, row, every, drawn.dtype)
            elif not math.isclose(row["total"], sum(p.loss for p in row["parts"]), rel_tol=1e-5):
                raise Wrong(
                    f"{where}: it returns the loss {row['total']:.6g}; the sum over this rank's "
                    f"tokens is {sum(p.loss for p in row['parts']):.6g}."
                )
        if step:
            same_bits(case, f"the model after {after}", [row["weights"] for row in rows])
            losses = [torch.tensor(row["loss"]).double() for row in rows]
            same_bits(case, f"the loss of {after}", losses)
    for rank, rows in enumerate(ranks):
        if not math.isnan(rows[-1]["nan"]):
            raise Wrong(
                f"{case}, rank {rank}: the loss of rank {drawn.odd} is nan, and train_step returns "
                f"{rows[-1]['nan']:.6g}.\nThe mean over all ranks is then nan, on every rank."
            )
        if rows[-1]["kept"] > 3 * rows[-1]["grad"].nbytes:
            raise Wrong(
                f"{case}, rank {rank}: after {len(norms)} steps {rows[-1]['kept']:,} bytes of what "
                "train_step made are still held.\nWho keeps them, and for what?"
            )


def _right_messages(where: str, events: list, gradients: int, small: int, size: int) -> None:
    """small: how many all-reduces of one number there may be."""
    if other := sorted({op for op, _ in events} - {"all_reduce"}):
        raise Wrong(f"{where}: a call of {', '.join(other)}; only all-reduces are needed.")
    large = [payload for _, payload in events if payload > SMALL]
    if not large:
        raise Wrong(
            f"{where}: the gradients are never all-reduced.\n"
            "The last micro-batch runs outside of no_sync, forward and backward."
        )
    if len(large) > 1:
        raise Wrong(
            f"{where}: {len(large)} all-reduces of gradients, and one is enough.\n"
            "Is the *forward* pass inside no_sync, too? DDP decides there. And DDP does all of "
            "them itself."
        )
    if large[0] > gradients:
        raise Wrong(
            f"{where}: an all-reduce of {large[0]:,} bytes, and the gradients have {gradients:,}."
        )
    found = len(events) - len(large)
    if found > small:
        raise Wrong(
            f"{where}: {found} small all-reduces, and {small} are enough: the tokens before the "
            "first\nmicro-batch, the loss after the last."
        )


def _one_model(case: str, after: str, first: torch.Tensor, other: torch.Tensor) -> None:
    """The gradients of two ranks before the optimizer's step, up to clipping."""
    if not alike(other, first):
        raise Wrong(
            f"{case}: in {after} two ranks have unequal gradients, though the number of "
            "all-reduces is right:\nthey will hold different models. Which micro-batch was "
            "all-reduced? DDP reads the flag in the forward pass."
        )


def _right_gradient(
    where: str, row: dict, every: list[Part], dtype: torch.dtype, max_norm: float, size: int
) -> None:
    """The gradient that the optimizer sees, or that backward leaves."""
    right = sum(part.grad for part in every) / sum(part.tokens for part in every)
    norm, got = right.norm().item(), row["grad"].double()
    clipped = norm > max_norm
    if not clipped:
        hint = _reason(got, every, size)
        close(where, "the gradient", row["grad"], right, dtype=dtype, hint=hint)
        return
    found = got.norm().item()
    # a hand may leave out the 1e-6 that clip_grad_norm_ adds to the norm
    if parallel(got, right) and abs(found / max_norm - 1) < 2e-6 / norm + 1e-5:
        return
    what = f"the gradient, clipped to {max_norm:.4g},"
    if alike(got, right):
        raise Wrong(
            f"{where}: {what} has still the norm {found:.4g} at the optimizer's step. Clip before."
        )
    if abs(found / max_norm - 1) < 1e-3:
        raise Wrong(
            f"{where}: {what} has the right norm and the wrong direction.\n"
            "Clip once, the accumulated gradient of all ranks."
        )
    raise Wrong(
        f"{where}: {what} has the norm {found:.4g}.\n"
        "Clip once, the accumulated gradient of all ranks, and let nobody change it afterwards."
    )


def _reason(got: torch.Tensor, every: list[Part], size: int) -> str:
    """What a wrong gradient happens to be."""
    total, tokens = sum(part.grad for part in every), sum(part.tokens for part in every)
    if not got.any():
        return "It is zero: was it set to zero before the optimizer's step?"
    if parallel(got, sum(part.grad / max(part.tokens, 1) for part in every)):
        return "It is the mean of the micro-batches' means: short ones weigh too much."
    if parallel(got, total):
        ratio = (got.norm() / (total / tokens).norm()).item()
        reason = f"It is {ratio:.3g} times the right one."
        if size > 1 and math.isclose(ratio, 1 / size, rel_tol=1e-3):
            reason += " DDP takes the mean over the ranks, and you need a sum over tokens."
        return reason
    return "Does every micro-batch count, each token with the same weight, and nothing else?"


def _right_step(where: str, row: dict, every: list[Part], dtype: torch.dtype) -> None:
    """What train_step leaves and returns, the gradient being right."""
    hint = "The gradient was right: is the step the optimizer's alone?"
    close(where, "the model", row["weights"], row["twin"], dtype=dtype, hint=hint)
    if row["left"]:
        raise Wrong(f"{where}: gradients are left over after the step: zero them.")
    right = sum(part.loss for part in every) / sum(part.tokens for part in every)
    loss = row["loss"]
    near = not math.isnan(loss) and math.isclose(loss, right, rel_tol=1e-5)
    close(
        where, "what train_step returns", torch.tensor(loss, dtype=dtype),
        torch.tensor(right, dtype=torch.float64),
        hint="Is there a float32 tensor on the way?" if near
        else "It should be the mean loss over the tokens of all ranks.",
    )
    memory, right = row["memory"], row["right memory"]
    if memory.above(right, 8 * row["grad"].nbytes + 2048):
        raise Wrong(
            f"{where}: {memory.peak:,} bytes that were made in the step are alive at one moment, "
            f"and\n{memory.forward:,} at the end of a forward pass; one micro-batch after another "
            f"needs {right.peak:,} and\n{right.forward:,}. Call backward for each micro-batch, "
            "before the next one's forward pass,\nand keep no tensor and no graph of it."
        )
