"""Given: what the check cell of exercise 02a looks at.

Ranks make steps with your functions, on micro-batches of unequal length: sums, gradients, messages
and memory are compared with what is right for one rank that has the whole batch. Then `reduce_once`
alone gets gradients and counts, as many as real batches have.
"""

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist

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
from labs.support.gradient_accumulation.tiny_model import loss_sum
from utils.course.assertions import Wrong, a_number, close, described, same_bits, unchanged
from utils.course.observe import Look
from utils.course.runner import Trial, fractions

HANG = "Do all ranks call the all-reduce, each once?"
CALLS = 4  # of reduce_once alone
LARGE = 230  # rows and columns: more than 50,000 numbers
SMALL = 64  # bytes that may stay after the steps: a number or two, no message


def accumulation(trial: Trial) -> str:
    """Judges `accumulate` and `reduce_once` in the file."""
    for group in trial.groups(hang=HANG):
        for dtype, late in some(trial, group.size, torch.float64, torch.float32):
            drawn = draw_case(trial, group.size, dtype, equally_many=False)
            case = group.case(str(drawn))
            _right_training(case, group.run(case, _train, drawn, late=late), drawn)
        if group.size == 2:
            drawn = draw_case(trial, group.size, torch.bfloat16, equally_many=False)
            case = group.case(str(drawn))
            for rank, sums in enumerate(group.run(case, _add_up, drawn)):
                _right_total(f"{case}, rank {rank}", *sums)
        types = torch.bfloat16, torch.float32, torch.float64
        for dtype, late in some(trial, group.size, *types):
            large = group.size == 2 and dtype == torch.float32
            drawn = _draw_gradients(trial, group.size, dtype, large)
            case = group.case(f"gradients in {_name(dtype)} of shapes {drawn.shapes}")
            _right_means(case, group.run(case, _reduce, drawn, late=late), drawn)
    return (
        "the gradient of the mean over all tokens is one rank's, on 1 to 6 ranks, in fp32 and\n"
        "fp64; padding, a rank without micro-batches and a missing gradient change nothing;\n"
        "bf16 gradients are added up in fp32, and so are a bf16 model's losses; counts of 60,000\n"
        "tokens a rank are exact; one all-reduce a step for everything, also for 50,000 numbers,\n"
        "the activations of one micro-batch at a time, of 1 to 11, and nothing kept after the step."
    )


# ---- a training


def _train(answer, drawn) -> list[dict]:
    """On a rank: the steps, and beside each what is right for this rank's share."""
    rank, rows = dist.get_rank(), []
    model = drawn.new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=drawn.lr)
    whole = Look()  # of the answer, in all steps
    for step in range(len(drawn.rows)):
        where = f"step {step + 1}"  # the case and the rank stand before it
        share = drawn.share(step, rank)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        row = {"parts": parts_of(model, share), "right memory": right_memory(model, share)}
        given, weights = list(share), [p.data for p in model.parameters()]
        look = Look(weights=weights, tokens=[x for x, _ in share], targets=[y for _, y in share])
        with whole, look, memory_in(model, look) as memory:
            sums = answer.accumulate(model, share)
        _same_list(where, share, given)
        unchanged(where, look.changed())
        if not isinstance(sums, tuple | list) or len(sums) != 2:
            raise Wrong(
                f"{where}: accumulate returns {described(sums)}: two numbers are asked for, "
                "(losses, tokens)."
            )
        row["early"], row["memory"] = [event.op for event in look.events], memory[0]
        row["sums"] = [
            a_number(where, f"accumulate's {name}", value)
            for name, value in zip(("sum of losses", "number of tokens"), sums)
        ]
        row["own"] = _gradients(model)
        with whole, Look(weights=weights) as look:
            loss = answer.reduce_once(model, *sums)
        unchanged(where, look.changed())
        row |= _reduced(where, model, look, loss)
        optimizer.step()
        rows.append(row)
        del sums, loss, look, share, given, weights
    rows[-1]["kept"] = whole.kept([p.grad for p in model.parameters()], allowed=SMALL)
    return rows


def _same_list(where: str, share: list, given: list) -> None:
    if len(share) != len(given) or any(a is not b for a, b in zip(share, given)):
        raise Wrong(f"{where}: the caller's list of micro-batches is not what it was.")


def _gradients(model) -> torch.Tensor:
    """All `.grad` in one, zeros where there is none."""
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def _reduced(where: str, model, look: Look, loss: Any) -> dict:
    """What reduce_once has left."""
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if missing:
        raise Wrong(
            f"{where}: {', '.join(missing)} still have no gradient.\n"
            "A rank without micro-batches starts from zeros, and gets the sum like all others."
        )
    if loss is None:
        raise Wrong(f"{where}: reduce_once returns nothing; the mean loss is asked for.")
    return {
        "loss": a_number(where, "what reduce_once returns", loss),
        "grad": _gradients(model),
        "events": [(event.op, event.payload) for event in look.events],
    }


def _right_training(case: str, ranks: list[list[dict]], drawn) -> None:
    for step, rows in enumerate(zip(*ranks)):
        wheres = [f"{case}, rank {rank}, step {step + 1}" for rank in range(len(rows))]
        for where, row in zip(wheres, rows):
            _right_sums(where, row)
        every = [part for row in rows for part in row["parts"]]
        tokens, loss = sum(part.tokens for part in every), sum(part.loss for part in every)
        grad = sum(part.grad for part in every)
        for where, row in zip(wheres, rows):
            _right_own_gradient(where, row, drawn.dtype)
            _right_messages(where, row["events"], len(grad), drawn.dtype, len(rows))
        for where, row in zip(wheres, rows):
            hint = _reason(row, every, len(rows))
            close(where, "the gradient", row["grad"], grad / tokens, dtype=drawn.dtype, hint=hint)
            _right_loss(where, row["loss"], loss / tokens, drawn.dtype)
            _right_memory(where, row, drawn)
        same_bits(case, f"the gradient after step {step + 1}", [row["grad"] for row in rows])
    for rank, rows in enumerate(ranks):
        if rows[-1]["kept"] > SMALL:
            raise Wrong(
                f"{case}, rank {rank}: after {len(rows)} steps {rows[-1]['kept']:,} bytes of what "
                "was made are still held,\ngradients not counted. Who keeps them, and for what?"
            )


def _right_sums(where: str, row: dict) -> None:
    if row["early"]:
        raise Wrong(
            f"{where}: accumulate communicates ({', '.join(row['early'][:3])}).\n"
            "Nobody needs the sums before the last micro-batch: leave it to reduce_once."
        )
    losses, tokens = row["sums"]
    right = sum(part.tokens for part in row["parts"])
    if tokens != right:
        hint = ""
        if tokens == sum(part.positions for part in row["parts"]):
            hint = "\nPadding (the target -100) does not count."
        raise Wrong(
            f"{where}: accumulate counts {tokens:g} tokens, this rank's micro-batches have "
            f"{right}.{hint}"
        )
    loss = sum(part.loss for part in row["parts"])
    if math.isnan(losses):
        raise Wrong(f"{where}: the loss is nan: a micro-batch may have no token that counts.")
    if not math.isclose(losses, loss, rel_tol=1e-5):
        raise Wrong(
            f"{where}: accumulate returns the loss {losses:.6g}; the sum over this rank's tokens "
            f"is {loss:.6g}.\nA sum, not a mean: every token weighs the same."
        )


def _right_own_gradient(where: str, row: dict, dtype: torch.dtype) -> None:
    """`.grad` between the two functions."""
    parts: list[Part] = row["parts"]
    right = sum((part.grad for part in parts), torch.zeros(len(row["own"]), dtype=torch.float64))
    hint = "accumulate leaves the gradient of the sum of this rank's losses in `.grad`."
    own = row["own"]
    if parts and alike(own, parts[-1].grad):
        hint += "\nIt is that of the last micro-batch alone."
    elif own.any() and parallel(own, sum(part.grad / max(part.tokens, 1) for part in parts)):
        hint += "\nIt adds up the micro-batches' means: the tokens of short ones weigh too much."
    close(where, ".grad after accumulate", own, right, dtype=dtype, hint=hint)


def _right_messages(where: str, events: list, numbers: int, dtype: torch.dtype, size: int) -> None:
    ops = [op for op, _ in events]
    if not ops and size == 1:
        return
    if other := sorted(set(ops) - {"all_reduce"}):
        raise Wrong(f"{where}: reduce_once calls {', '.join(other)}; one all-reduce is enough.")
    if len(ops) != 1:
        raise Wrong(
            f"{where}: {len(ops)} all-reduces in a step, where one is enough:\n"
            "put the gradients, the loss and the number of tokens into one tensor."
        )
    most = (numbers + 2) * max(dtype.itemsize, 4)
    if events[0][1] > most:
        raise Wrong(
            f"{where}: an all-reduce of {events[0][1]:,} bytes; the gradients and two numbers are "
            f"{most:,}."
        )


def _reason(row: dict, every: list[Part], size: int) -> str:
    """What a wrong gradient happens to be."""
    tokens, own = sum(part.tokens for part in every), sum(part.tokens for part in row["parts"])
    grad, total = row["grad"], sum(part.grad for part in every)
    if alike(grad, total):
        return f"It is {tokens} times the right one, as many as there are tokens: divide."
    if alike(grad, total / size):
        return "It is the sum divided by the number of ranks, not by the number of tokens."
    if alike(grad, total / sum(part.positions for part in every)):
        return "It is the sum divided by all positions: padding does not count."
    if own and alike(grad, total / own):
        return "It is the sum divided by the tokens of this rank, not by those of all ranks."
    return "Are all numbers copied back to the parameters that they came from?"


def _right_loss(where: str, loss: float, right: float, dtype: torch.dtype) -> None:
    near = not math.isnan(loss) and math.isclose(loss, right, rel_tol=1e-5)
    close(
        where, "what reduce_once returns", torch.tensor(loss, dtype=dtype),
        torch.tensor(right, dtype=torch.float64),
        hint="Is there a float32 tensor on the way? The gradients are float64." if near
        else "It should be the mean loss over the tokens of all ranks.",
    )


def _right_memory(where: str, row: dict, drawn) -> None:
    memory, right = row["memory"], row["right memory"]
    if memory.above(right, 3 * row["grad"].nbytes + 2048):
        raise Wrong(
            f"{where}: {memory.peak:,} bytes that were made in accumulate are alive at one moment, "
            f"and\n{memory.forward:,} at the end of a forward pass; one micro-batch after another "
            f"needs {right.peak:,} and\n{right.forward:,}. Call backward for each micro-batch, "
            "before the next one's forward pass,\nand keep no tensor and no graph of it."
        )


# ---- losses of a bf16 model


def _add_up(answer, drawn) -> tuple[list[float], list[float]]:
    """On a rank: the sums that accumulate returns, and those of the losses."""
    model, found, right = drawn.new_model(), [], []
    for step in range(len(drawn.rows)):
        share = drawn.share(step, dist.get_rank())
        right.append(math.fsum(loss_sum(model, x, y).item() for x, y in share))
        losses, _ = answer.accumulate(model, share)
        found.append(a_number(f"step {step + 1}", "accumulate's sum of losses", losses))
    return found, right


def _right_total(where: str, found: list[float], right: list[float]) -> None:
    for step, (mine, total) in enumerate(zip(found, right), 1):
        if not math.isclose(mine, total, rel_tol=1e-5):
            raise Wrong(
                f"{where}, step {step}: accumulate returns the loss {mine:.6g}; the losses of this "
                f"rank's micro-batches\nmake {total:.6g}. In which type are they added up?"
            )


# ---- reduce_once alone


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What the ranks hand to some calls of reduce_once."""

    dtype: torch.dtype
    shapes: list
    seed: int
    missing: list  # [call][rank]: numbers of the parameters without a gradient
    tokens: list  # [call][rank]
    losses: list  # [call][rank]
    nan: int  # the rank that has a NaN in its last gradient of the last call

    def of(self, call: int, rank: int) -> list[torch.Tensor | None]:
        """A rank's gradients."""
        missing, grads = self.missing[call][rank], []
        for number, shape in enumerate(self.shapes):
            seed = self.seed + 10_000 * call + 100 * rank + number
            grads.append(None if number in missing else fractions(seed, *shape, dtype=self.dtype))
        if call == len(self.tokens) - 1 and rank == self.nan:
            grads[-1].view(-1)[0] = math.nan
        return grads


def _draw_gradients(trial: Trial, size: int, dtype: torch.dtype, large: bool) -> Gradients:
    """large: more than 50,000 numbers."""
    draw = trial.draw
    shapes = [(draw.randrange(2, 9), draw.randrange(2, 9)) for _ in range(draw.randrange(1, 4))]
    shapes += [(LARGE, LARGE)] * large + [(draw.randrange(20, 40),)]
    missing, tokens = [], []
    for call in range(CALLS):
        missing.append([[] for _ in range(size)])
        tokens.append([draw.randrange(300, 60_000) | 1 for _ in range(size)])
        if size > 1 and call < CALLS - 1:
            odd = draw.randrange(size)
            some = draw.randrange(len(shapes))
            missing[-1][odd] = [some] if call else list(range(len(shapes)))
            tokens[-1][odd] *= call > 0
    losses = [[count * draw.uniform(1, 4) for count in counts] for counts in tokens]
    return Gradients(
        dtype, shapes, trial.new_seed(), missing, tokens, losses, draw.randrange(size)
    )


def _reduce(answer, drawn: Gradients) -> list[dict]:
    """On a rank: some calls with gradients that the judge knows."""
    rank, results = dist.get_rank(), []
    model = torch.nn.Module()
    for number, shape in enumerate(drawn.shapes):
        model.register_parameter(
            f"weight{number}", torch.nn.Parameter(torch.ones(shape).to(drawn.dtype))
        )
    for call in range(CALLS):
        where = f"call {call + 1}"
        for parameter, grad in zip(model.parameters(), drawn.of(call, rank)):
            parameter.grad = grad
        with Look() as look:
            loss = answer.reduce_once(model, drawn.losses[call][rank], drawn.tokens[call][rank])
        results.append(_reduced(where, model, look, loss))
    return results


def _right_means(case: str, ranks: list[list[dict]], drawn: Gradients) -> None:
    size = len(ranks)
    for call, results in enumerate(zip(*ranks)):
        tokens, loss = sum(drawn.tokens[call]), sum(drawn.losses[call])
        total, largest = 0.0, 0.0
        for rank in range(size):
            pairs = zip(drawn.of(call, rank), drawn.shapes)
            mine = flat(torch.zeros(s) if g is None else g for g, s in pairs).double()
            total, largest = total + mine, largest + mine.abs()
        for rank, result in enumerate(results):
            where = f"{case}, rank {rank}, {tokens:,} tokens on all ranks together"
            _right_messages(where, result["events"], len(total), drawn.dtype, size)
            hint = "In which type do the numbers travel, and what does it make of this count?"
            got, right = result["grad"], total / tokens
            close(where, "the gradient", got, right, dtype=drawn.dtype, hint=hint)
            if drawn.dtype == torch.bfloat16:
                _rounded_once(where, got, right, largest / tokens)
            dtype = torch.promote_types(drawn.dtype, torch.float32)
            returned = torch.tensor(result["loss"], dtype=dtype)
            right = torch.tensor(loss / tokens, dtype=torch.float64)
            close(where, "what reduce_once returns", returned, right, hint=hint)
        same_bits(case, "the gradient", [result["grad"] for result in results])
        same_bits(case, "the mean loss", [torch.tensor(r["loss"]).double() for r in results])


def _rounded_once(where: str, got: torch.Tensor, right: torch.Tensor, largest) -> None:
    """bf16 numbers are at most a step of bf16 away: they were added up with more digits."""
    step = torch.finfo(got.dtype).eps * 2.0 ** (torch.frexp(right).exponent - 1)
    far = (got.double() - right).abs() > 1.01 * step + 1e-6 * largest
    if far.any():
        raise Wrong(
            f"{where}: {int(far.sum())} of {far.numel()} numbers of the gradient are more than one "
            "rounding to bf16 away\nfrom the mean. Are they added up in bf16? fp32 holds the sum."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).split(".")[1]
