"""Given: the contracts of exercises 03a, b and c, and the judges behind their check cells."""

import math
import random
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from utils.course.assertions import (
    Wrong,
    a_number,
    alike,
    bitwise_equal,
    close,
    communication,
    described,
    same_bits,
    told,
    unchanged,
)
from utils.course.observe import Look
from utils.course.properties import beside
from utils.course.runner import Trial, fractions
from utils.measure.traffic import Event
from utils.memory.number_formats import FORMATS, spacing

Tensors = list[torch.Tensor | None]
SIZES = (2, 3, 1)  # ranks: nothing here would differ on more


def copies(tensors: Tensors) -> Tensors:
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def one_all_reduce(where: str, events: list[Event], size: int, hint: str) -> None:
    """There is one all-reduce of `size` bytes; a single rank may do without."""
    if events or dist.get_world_size() > 1:
        communication(where, events, {"all_reduce": [size]}, hint)


# ---- exercise a: the answer beside a reference

ASK_ALL = "Does every rank call the all-reduce, including the ranks that see nothing wrong?"
COUNTING = (
    "An overflow multiplies the scale by backoff_factor; growth_interval good steps in a row\n"
    "multiply it by growth_factor; after either, counting starts again at zero."
)


class Reference:
    """The rules of the scale; `update` is told whether any rank had an overflow."""

    def __init__(self, init_scale, growth_factor, backoff_factor, growth_interval):
        self.scale, self.growth, self.backoff = init_scale, growth_factor, backoff_factor
        self.interval, self.good_steps = growth_interval, 0

    def update(self, overflow: bool) -> None:
        self.good_steps = 0 if overflow else self.good_steps + 1
        grows = self.good_steps == self.interval
        self.scale *= self.backoff if overflow else self.growth**grows
        self.good_steps *= not grows


def same_state(where: str, mine: Any, right: Reference) -> None:
    for name in ("scale", "good_steps"):
        got, wanted = a_number(where, name, getattr(mine, name)), getattr(right, name)
        if not math.isclose(got, wanted, rel_tol=1e-5):
            raise Wrong(f"{where}: {name} is {got:g}, and {wanted:g} is right.\n{COUNTING}")


def scaler(trial: Trial) -> str:
    """Judge the LossScaler in the file."""
    trial.forbid(("GradScaler",))
    for group in trial.groups(SIZES, hang=ASK_ALL):
        for shares in (False, True):
            case = group.case("sharded parameters" if shares else "all parameters on every rank")
            group.run(case, stepped, trial.new_seed(), shares, late=shares)
        if group.size == 1:
            group.run("update()", rules, trial.new_seed())
    return (
        "scales, skipped steps and gradients are right on 1, 2 and 3 ranks, by the rules of\n"
        "torch.amp.GradScaler with drawn factors and intervals, near the largest values too; one\n"
        "all-reduce of one value per step; all ranks skip together, even where each holds only\n"
        "some of the parameters, or none."
    )


def rules(answer: Any, seed: int) -> None:
    """Check `update` on its own, with drawn options and overflows."""
    options = {
        "init_scale": st.sampled_from([2.0**n for n in range(-4, 17)]),
        "growth_factor": st.sampled_from((2.0, 4.0, 1.5)),
        "backoff_factor": st.sampled_from((0.5, 0.25, 0.75)),
        "growth_interval": st.integers(1, 5),
    }
    beside(
        seed, lambda chosen: (answer.LossScaler(**chosen), Reference(**chosen)),
        st.fixed_dictionaries(options), {"update": (st.booleans(),)}, same_state,
    )


def stepped(answer: Any, seed: int, shares: bool) -> None:
    """On a rank: take steps with an optimizer of two groups, and compare with the reference; all
    ranks draw the same. shares: each parameter is owned by one rank, and the last rank has none."""
    draw, rank, size, seen = random.Random(seed), dist.get_rank(), dist.get_world_size(), []
    first = answer.LossScaler()  # the methods that are written first
    first.scale_loss(torch.ones(()))
    first.unscale([])
    first.update(False)
    shapes = [(draw.randrange(2, 6), draw.randrange(2, 6)) for _ in range(4)] + [(7,), ()]
    owners = [draw.randrange(max(size - 1, 1)) for _ in shapes]
    own = {
        index: torch.nn.Parameter(torch.ones(shape))
        for index, (shape, owner) in enumerate(zip(shapes, owners)) if not shares or owner == rank
    }
    model = list(own.values())
    optimizer = torch.optim.SGD([{"params": model[::2]}, {"params": model[1::2]}], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(copies([p.grad for p in model])))
    options = {"init_scale": 4.0, "growth_factor": draw.choice((2.0, 4.0)), "backoff_factor": 0.5,
               "growth_interval": 2}
    mine, right = answer.LossScaler(**options), Reference(**options)
    for number, bad in enumerate((None, math.inf, None, None, math.nan, None), start=1):
        where, place = f"step {number}, scale {right.scale:g}", draw.randrange(len(shapes))
        where_bad = owners[place] if shares else draw.randrange(size)
        true = [fractions(draw.getrandbits(31), *shape) for shape in shapes]
        if number == 1:  # finite, but their sum is not
            large = 0.9 * torch.finfo(torch.float32).max / right.scale
            true = [torch.full(shape, large, dtype=torch.float64) for shape in shapes]
        loss = torch.zeros((), requires_grad=True) + sum(
            (p * true[index].float()).sum() for index, p in own.items()
        )
        kept = loss.detach().clone()
        mine.scale_loss(loss).backward()
        if not bitwise_equal(loss, kept):
            raise Wrong(f"{where}: scale_loss changes the caller's loss: return a new tensor.")
        if bad and rank == where_bad:
            own[place].grad.view(-1)[-1] = bad
        if (none := (place + 1) % len(shapes)) in own:
            own[none].grad = None
        given = [p.grad for p in model]
        norm = float(sum(true[i].square().sum() for i, p in own.items() if p.grad is not None))
        clip = None if shares or number not in (4, 6) else (0.4 if number == 4 else 3) * norm**0.5
        with Look() as look:
            made = mine.step(optimizer, clip) if clip else mine.step(optimizer)
        if bool(made) == bool(bad) or len(seen) != (not bad):
            found = f"rank {where_bad} has {bad} in a gradient" if bad else "all is finite"
            does = f"takes {len(seen)} optimizer steps and returns {made}"
            raise Wrong(
                f"{where}: {found}, and rank {rank} {does}.\nThe ranks do not agree, or none "
                "skips: what one rank finds, even a NaN, applies to all. Which ReduceOp does that?"
            )
        factor = min(1.0, clip / norm**0.5) if clip else 1.0
        for got, wanted in zip(seen.pop() if seen else [], (true[index] for index in own)):
            if got is not None:  # hand-written clipping differs in the last digits
                ratio = float(got.double().norm() / wanted.norm())
                close(where, "a gradient at the step", got, wanted * factor, slack=100,
                      hint=symptom(ratio, right.scale, factor))
        if any(p.grad is not gradient for p, gradient in zip(model, given)):
            raise Wrong(f"{where}: .grad is a new tensor. Divide in place: others share it.")
        hint = f"One value is enough: check all gradients first, then all-reduce once.\n{ASK_ALL}"
        few = min(8, look.events[0].payload) if look.events else 4
        one_all_reduce(where, look.events, few, hint)
        right.update(bool(bad))
        same_state(f"{where}, after {'an overflow' if bad else 'a good step'}", mine, right)
        optimizer.zero_grad()


def symptom(ratio: float, scale: float, factor: float) -> str:
    """A hint. ratio: of the gradient to the true one; factor: by which clipping should scale it."""

    def near(number: float) -> bool:
        return math.isclose(ratio, number, rel_tol=1e-3)

    if near(scale):
        return f"It is too large by a factor of {scale:g}, the scale: it is not divided by it."
    if near(1.0):
        return "It is not clipped, but otherwise right; `clip` is the largest norm it may have."
    if any(map(near, (0.25, 0.5, 2.0, 4.0))):
        return "Is it divided by the scale of the loss? First unscale, then update."
    if ratio < 0.9 * factor:
        return "It is too small. Are the gradients unscaled when they are clipped?"
    return "Is it divided by the scale, then clipped if asked, and nothing else?"


# ---- exercise b: fp32 masters against plain training in fp32

OPTIMIZERS = (("SGD", {"momentum": 0.9}), ("AdamW", {"weight_decay": 0.1}))
ROUNDED = (
    "Its gradient was right. Masters are kept for the whole training: do not read the parameters\n"
    "back into them, because bf16 has rounded them."
)


class Training:
    """A training in bf16, the same on every rank. micro: micro-batches in each step; gaps: rank
    `odd` has no gradient for the first parameter in step 0, and none at all in step 1."""

    def __init__(self, seed: int, size: int, gaps: bool):
        draw, self.seed, self.micro = random.Random(seed), seed, (3, 2, 4)
        self.shapes = [(draw.randrange(2, 9), draw.randrange(2, 9)), (draw.randrange(3, 30),)]
        self.optimizer, options = draw.choice(OPTIMIZERS)
        self.options = options | {"lr": draw.uniform(0.005, 0.03)}
        self.odd = draw.randrange(size) if gaps else None

    def drawn(self, seed: int) -> list[torch.Tensor]:
        return [fractions(seed + n, *shape).bfloat16() for n, shape in enumerate(self.shapes)]

    def batches(self, step: int, rank: int) -> list[Tensors]:
        """The gradients that each backward pass of a step leaves on a rank."""
        odd, found = rank == self.odd, []
        for micro in range(0 if odd and step == 1 else self.micro[step]):
            found.append(self.drawn(self.seed + 100_000 * (step + 1) + 1000 * micro + 10 * rank))
            if odd and step == 0:
                found[-1][0] = None
        return found

    def means(self, step: int, last: bool = False, bf16: bool = False) -> list[torch.Tensor]:
        """The mean gradients over the ranks, in fp64. last: of the last micro-batches only; bf16:
        accumulated in bf16."""
        total = [torch.zeros(shape, dtype=torch.float64) for shape in self.shapes]
        size = dist.get_world_size()
        for rank in range(size):
            for number, several in enumerate(zip(*self.batches(step, rank))):
                parts = [part if bf16 else part.double() for part in several if part is not None]
                parts = parts[-1:] if last else parts
                total[number] += sum(parts[1:], parts[0]) / size if parts else 0
        return total


def master_weights(trial: Trial) -> str:
    """Judge the MasterWeights in the file."""
    for group in trial.groups(SIZES, hang="Does every rank call the same collectives?"):
        for late in (False, True):
            plan = Training(trial.new_seed(), group.size, gaps=late)
            case = group.case(f"parameters of shapes {plan.shapes}")
            group.run(case, trained, plan, late=late)
    return (
        "masters and parameters equal plain training in fp32 on 1, 2 and 3 ranks, for any number\n"
        "of micro-batches, even where a rank has no gradient; micro-batches are accumulated in\n"
        "fp32 and averaged in one fp32 message per step; the model stays bf16, and no gradient\n"
        "outlives its step."
    )


def trained(answer: Any, plan: Training) -> None:
    """On a rank: take steps, and compare with a plain optimizer in fp32."""
    rank, seen = dist.get_rank(), []
    kind, start = getattr(torch.optim, plan.optimizer), plan.drawn(plan.seed)
    model, twins = [torch.nn.Parameter(x) for x in start], [x.float() for x in start]

    def make(masters: list[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = kind(masters, **plan.options)
        optimizer.register_step_pre_hook(lambda *_: seen.append(copies([m.grad for m in masters])))
        return optimizer

    optimizer, twin = answer.MasterWeights((p for p in model), make), kind(twins, **plan.options)
    for step in range(len(plan.micro)):
        where = f"rank {rank}, step {step + 1}"
        with Look() as look:
            for batch in plan.batches(step, rank):
                for parameter, gradient in zip(model, batch):
                    parameter.grad = gradient
                optimizer.collect()
                if any(p.grad is not None for p in model):
                    raise Wrong(
                        f"{where}: a parameter's .grad is not None after collect(): it takes "
                        "memory, and would be counted twice."
                    )
            optimizer.step()
        if len(seen) != 1:
            raise Wrong(f"{where}: step() calls the optimizer {len(seen)} times.")
        hint = (
            "Send one message, with all gradients in one flat fp32 tensor: fewer latencies, and "
            "in 16 bits\neach addition would be rounded. With no message, each rank follows its "
            "own rows."
        )
        size = 4 * sum(map(math.prod, plan.shapes))
        one_all_reduce(f"{where}, collect() and step()", look.events, size, hint)
        right_means(where, plan, step, seen[0])
        for tensor, mean in zip(twins, seen.pop()):
            tensor.grad = mean
        twin.step()
        right_weights(where, optimizer.masters, model, twins)


def right_means(where: str, plan: Training, step: int, seen: Tensors) -> None:
    """Check the gradients that the inner optimizer saw."""
    size, means = dist.get_world_size(), plan.means(step)
    last, bf16 = plan.means(step, last=True), plan.means(step, bf16=True)
    for number, (got, right) in enumerate(zip(seen, means)):
        likely = [
            (size * right, f"It is {size} times the mean: divide by the number of ranks."),
            (last[number], "It is that of the last micro-batch only: add up, do not overwrite."),
            (bf16[number], "It was accumulated in bf16: convert each to fp32 before you add it."),
            (got, "It should be the mean over the ranks of all micro-batches, each once."),
        ]
        hint = told([(lambda got, x=x: alike(got, x, 1000), words) for x, words in likely], got)
        close(where, f".grad of master {number} at the optimizer's step", got, right,
              dtype=torch.float32, hint=hint)


def right_weights(where: str, masters: list, model: list, twins: list[torch.Tensor]) -> None:
    for number, (master, mine, twin) in enumerate(zip(masters, model, twins)):
        close(where, f"master {number}", master, twin.double(), dtype=torch.float32, hint=ROUNDED)
        close(where, f"parameter {number}", mine, master.detach().bfloat16().double(), slack=0,
              dtype=torch.bfloat16,
              hint="It should be its master, rounded to the nearest bf16 number.")
        if master.grad is not None:
            raise Wrong(
                f"{where}: after step() masters still have a .grad: it takes 4 bytes per "
                "parameter, and the next\nstep would begin with this step's gradients. Set it to "
                "None."
            )


# ---- exercise c: stochastic rounding, sampled often enough

BF16 = FORMATS["bf16"]
PARTS = (0.0012, 0.13, 0.5, 0.77, 0.996, 0.37)  # of the way up to the next bf16 number
# 1e-20 is rounded to bf16 first; 2⁻¹³⁰ is subnormal, as is the value made for 0.37 of PARTS
SPECIAL = (0.0, 1.0, -2.5, 1e-20, 2.0**-130, -(2.0**-133), math.inf, -math.inf, math.nan)
TIMES = 20_000
SIGMAS = 7  # standard deviations that a mean may be off: one right answer in 10¹¹ fails


def stochastic(trial: Trial) -> str:
    """Judge `round_stochastically` and `sgd_step` in the file."""
    values, seed = numbers_to_round(trial.draw), trial.new_seed()
    for group in trial.groups((1, 2, 3)):
        if group.size == 1:
            group.run("round_stochastically", rounded, values, seed)
        plan, case = Update(trial.new_seed(), group.size == 3), group.case("sgd_step")
        ranks = group.run(case, updated, plan)
        for results in zip(*ranks):
            for weights in zip(*results):
                hint = "Each rank draws its own random numbers; all need the same ones."
                same_bits(case, "the weights", weights, hint)
        right_updates(case, plan, ranks[0])
    return (
        "each number goes to one of its two neighbours, and the mean is the number itself; NaNs\n"
        "and values that bf16 can hold stay, subnormal numbers too; steps in bf16 go as far as in\n"
        "exact arithmetic, each with random numbers of its own; 1, 2 and 3 ranks keep the same\n"
        "weights, bit for bit, without a message."
    )


def numbers_to_round(draw: random.Random) -> list[float]:
    """Numbers between two bf16 neighbours, small and large, then special ones."""
    values = []
    for part in PARTS:
        low = draw.uniform(1, 1.99) * 10.0 ** draw.randrange(-20, 20)
        if part == PARTS[-1]:
            low = draw.uniform(1, 1.99) * 2.0 ** -draw.randrange(127, 132)
        low = (torch.tensor(low).view(torch.int32) & -(2**16)).view(torch.float32).double()
        value = (low + part * spacing(low, BF16)).float().item()
        values.append(value * draw.choice((-1, 1)))
    return values + [torch.tensor(value).bfloat16().item() for value in SPECIAL]


def fair(where: str, exact: torch.Tensor, got: torch.Tensor, hint: str) -> None:
    """Each of `got` is a neighbour of its number, and the upper one with the right frequency."""
    moved = ways(exact, got)
    if (off := moved.abs() > 1.001).any():
        becomes = f"{exact[off][0].item():.9g} becomes {got[off][0].item():.9g}"
        raise Wrong(
            f"{where}: {becomes}. Only the neighbour below or above may come out.\n"
            "Is all of it computed in fp32, and does the weight move in the right direction?"
        )
    part = (exact.abs() / spacing(exact.abs(), BF16)) % 1
    spread = (part * (1 - part)).sum().sqrt()
    if moved.sum().abs() > SIGMAS * spread:
        raise Wrong(
            f"{where}: {len(exact):,} results are off by {float(moved.mean()):+.4f} steps of "
            f"bf16 on average.\n{hint}"
        )


def ways(exact: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """How far each number was moved away from zero, in steps of bf16: −part or 1 − part."""
    return (got.double() - exact) * exact.sign() / spacing(exact.abs(), BF16)


def rounded(answer: Any, values: list[float], seed: int) -> None:
    """Round each value many times, and check the rest of the contract."""
    x, inner, chance = torch.tensor(values).repeat(TIMES, 1), len(PARTS), torch.Generator()
    nan = x.view(torch.int32)[:, -1]
    nan[::2], nan[1::2] = 0x7FFFFFFF, 0x7F800001  # NaNs that a carry or truncation destroys
    with Look(x=x) as look:
        got = answer.round_stochastically(x, chance.manual_seed(seed))
    unchanged("rounding", look.changed(), "Make a new tensor.")
    if got.shape != x.shape or got.dtype != torch.bfloat16:
        raise Wrong(
            f"for an input of shape {tuple(x.shape)} it returns {described(got)}.\nTwice as long? "
            "torch's integers have 64 bits by default: dtype=torch.int32."
        )
    exact = x.double()
    moved = ways(exact[:, :inner], got[:, :inner])
    if all(len(column.unique()) == 1 for column in moved.T):
        raise Wrong(
            f"{exact[0, 2].item():.9g} is always rounded to {got[0, 2].item():g}: where is the "
            "randomness?\nOr do all elements share one random number? Each needs its own."
        )
    if ((moved.mean(dim=0) - 0.5).abs() < 0.1).all():
        raise Wrong(
            "On average the results are half a step too large: you add the random bits and then "
            "round to nearest.\nDrop the lower 16 bits instead."
        )
    for index, value in enumerate(values):
        if index < inner:
            hint = "The probability of rounding up must be the fraction of the way up."
            fair(f"{value:.9g}", exact[:, index], got[:, index], hint)
        else:
            close("values that bf16 can hold must not change", f"a result for {value:g}",
                  got[:, index], exact[:, index], slack=0)
    again = answer.round_stochastically(x, chance.manual_seed(seed))
    if not bitwise_equal(again[:, :inner], got[:, :inner]):
        raise Wrong(
            "The same generator state gives other results: draw only from `generator`."
        )


class Update:
    """Updates of three parameters, two of them equal; the third may lack a gradient. numbers: the
    numbers of the steps."""

    def __init__(self, seed: int, missing: bool):
        draw = random.Random(seed)
        shape, self.lr = (draw.randrange(20, 40), 30), draw.uniform(0.1, 0.9)
        weight = fractions(seed, *shape).sign() + 0.3 * fractions(seed + 1, *shape)
        self.weights = [weight.bfloat16(), weight.bfloat16(), fractions(seed + 2, 7).bfloat16()]
        grad = (0.004 * fractions(seed + 3, *shape)).bfloat16()
        self.grads = [grad, grad, None if missing else fractions(seed + 4, 7).bfloat16()]
        self.numbers = seed % 100, seed % 100 + 1


def updated(answer: Any, plan: Update) -> list[list[torch.Tensor]]:
    """On a rank: the parameters after each step, always from the same weights. Rank 0 starts one
    step later than the others."""
    results, numbers = [], [plan.numbers[0]] * bool(dist.get_rank()) + [*plan.numbers]
    for number in numbers:
        parameters = [torch.nn.Parameter(weight.clone()) for weight in plan.weights]
        for parameter, grad in zip(parameters, copies(plan.grads)):
            parameter.grad = grad
        grads = [p.grad for p in parameters if p.grad is not None]
        with Look(**{"a gradient": grads}) as look:
            answer.sgd_step(parameters, plan.lr, number, dist.get_rank())
        unchanged(f"step {number}", look.changed())
        if look.events:
            raise Wrong(
                f"sgd_step calls {look.events[0].op}. The ranks can agree without a message: what "
                "do they all know?"
            )
        results.append(copies(parameters))
    return results[-2:]


def right_updates(case: str, plan: Update, results: list[list[torch.Tensor]]) -> None:
    (one, other, third), (later, *_) = results
    weight, grad = plan.weights[0], plan.grads[0]
    if one.equal(weight - plan.lr * grad):
        raise Wrong(
            f"{case}: is the new weight computed in bf16? Then it is rounded to nearest before "
            "you can round it:\nconvert to fp32 first."
        )
    if one.equal(later):
        raise Wrong(f"{case}: every step rounds the same values up: draw new numbers per step.")
    if one.equal(other):
        raise Wrong(f"{case}: two parameters use the same random numbers: draw them in turn.")
    if plan.grads[2] is None:
        close(case, "a parameter without a gradient", third, plan.weights[2], slack=0)
    exact = (weight.float() - plan.lr * grad.float()).double().flatten().repeat(3)
    found = torch.cat([got.flatten() for got in (one, other, later)])
    hint = "Is the new weight computed in fp32, and rounded only by round_stochastically?"
    fair(case, exact, found, hint)
