"""Given: what exercises 03a, b and c ask for, and how their check cells judge it."""

import itertools
import math
import random
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from labs.support.mixed_precision.measurements import OPTIONS, GradScaler, train
from utils.course.assertions import (
    Wrong,
    a_number,
    bitwise_equal,
    close,
    communication,
    described,
    nothing_kept,
    same_bits,
    unchanged,
)
from utils.course.observe import Look
from utils.course.properties import beside
from utils.course.runner import Trial, fractions
from utils.measure.traffic import Event
from utils.memory.number_formats import FORMATS, spacing

Tensors = list[torch.Tensor | None]


def copies(tensors: Tensors) -> Tensors:
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def one_all_reduce(where: str, events: list[Event], size: int, hint: str) -> None:
    """Of so many bytes; a single rank may do without."""
    if events or dist.get_world_size() > 1:
        communication(where, events, {"all_reduce": [size]}, hint)


# ---- exercise a: the answer beside a reference

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ASK_ALL = "Does every rank call the all-reduce, also the ranks that see nothing wrong?"
COUNTING = (
    "An overflow multiplies the scale by backoff_factor; growth_interval good steps in a row\n"
    "multiply it by growth_factor; after either, the counting begins anew."
)


class Reference:
    """The rules, told of an overflow anywhere."""

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
    """Judges the LossScaler in the file."""
    trial.forbid(("GradScaler",))
    trial.alone("update()", rules, trial.new_seed())
    for group in trial.groups(hang=ASK_ALL):
        for shares in (False, True):
            case = group.case("a share of the parameters each" if shares else "all parameters each")
            group.run(case, scaled_steps, trial.new_seed(), shares, late=shares)
        if group.size <= 3:  # DDP and fp16 are the same on more
            clip, seed = trial.draw.uniform(0.2, 0.5), trial.new_seed()
            options = OPTIONS | {"growth_interval": trial.draw.randrange(2, 4)}
            group.run(group.case("DDP in fp16"), beside_grad_scaler, options, clip, seed)
    return (
        "scales, skipped steps and gradients are right on 1 to 6 ranks, with drawn factors and\n"
        "intervals, far below 1 and near the largest numbers too; on 1 to 3 they equal\n"
        "torch.amp.GradScaler's in real fp16 under DDP; one all-reduce of one number a step;\n"
        "where each rank holds a share of the parameters, or none, all skip together."
    )


def rules(answer: Any, seed: int) -> None:
    """`update` alone, with drawn options and overflows."""
    first = answer.LossScaler()
    first.scale_loss(torch.ones(()))  # the pieces that are written first
    first.unscale([])
    options = {
        "init_scale": st.sampled_from([2.0**n for n in range(-4, 17)]),
        "growth_factor": st.sampled_from((2.0, 4.0, 1.5)),
        "backoff_factor": st.sampled_from((0.5, 0.25, 0.75)),
        "growth_interval": st.integers(1, 5),
    }
    with Look() as look:
        beside(
            seed, lambda chosen: (answer.LossScaler(**chosen), Reference(**chosen)),
            st.fixed_dictionaries(options), {"update": (st.booleans(),)}, same_state, most=40,
        )
    if look.events:
        raise Wrong(f"update() calls {look.events[0].op}; unscale() has asked the ranks already.")


class Gradients:
    """Of parameters with these shapes; with `shares`, each has one rank as its owner."""

    def __init__(self, draw: random.Random, shares: bool):
        self.rank, size = dist.get_rank(), dist.get_world_size()
        self.shapes = [(draw.randrange(2, 6), draw.randrange(2, 6)) for _ in range(4)] + [(7,), ()]
        turn = draw.randrange(size)  # whose neighbour has nothing
        self.owners = [(draw.randrange(max(size - 1, 1)) + turn) % size for _ in self.shapes]
        self.mine = [not shares or owner == self.rank for owner in self.owners]

    def drawn(self, seed: int, dtype: torch.dtype, none: int | None) -> Tensors:
        """The same on all ranks, as after DDP's all-reduce, in one buffer; None for parameter
        `none` and for what others own."""
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = fractions(seed, sum(sizes), dtype=dtype).split(sizes)
        return [
            part.view(shape) if mine and i != none else None
            for i, (part, shape, mine) in enumerate(zip(parts, self.shapes, self.mine))
        ]


def scaled_steps(answer: Any, seed: int, shares: bool) -> None:
    """On a rank: `unscale` by itself, then whole steps; all ranks draw the same."""
    draw = random.Random(seed)
    gradients = Gradients(draw, shares)
    for number, dtype in enumerate((*TYPES, *TYPES[2:])):
        unscaled(answer, draw, gradients, dtype, number > 3, shares)
    stepped(answer, draw, gradients, shares)


def unscaled(answer: Any, draw: random.Random, gradients: Gradients, dtype: torch.dtype,
             infinite: bool, shares: bool) -> None:
    """`unscale` by itself. infinite: a number on one rank; else large ones, whose sum is."""
    scale, none = (4.0, 300.0)[infinite], draw.randrange(3)
    where = f"unscale() alone, with the scale {scale:g}, {dtype} gradients"
    where += ", the first number infinite on one rank" * infinite
    given = gradients.drawn(draw.getrandbits(31), dtype, none if shares else None)
    here = [gradient for gradient in given if gradient is not None]
    for gradient in [] if infinite else here:
        gradient.fill_(0.9 * torch.finfo(dtype).max)
    if infinite and gradients.rank == gradients.owners[none - 1]:
        here[0].view(-1)[0] = math.inf
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in gradients.shapes]
    for parameter, gradient in zip(parameters, given):  # as DDP has them: views of one buffer
        parameter.grad = None if gradient is None else gradient.view_as(gradient)
    before = copies(given)
    with Look() as look:
        found = answer.LossScaler(init_scale=scale).unscale(parameters)
    for parameter, gradient, old in zip(parameters, given, before):
        if (parameter.grad is None) != (gradient is None):
            raise Wrong(f"{where}: a tensor stands in place of None, or None in place of one.")
        if old is not None:
            hint = "Is every gradient divided by the scale, in place, in its own memory?"
            close(where, "a gradient", gradient, old.double() / scale, hint=hint)
    if bool(found) != infinite:
        told = ("all gradients are finite, and unscale says that one is not",
                "it is not finite, and unscale says that all are")[infinite]
        raise Wrong(f"{where}: {told}. It is what any rank has found.")
    one_number(where, look.events)


def one_number(where: str, events: list[Event]) -> None:
    hint = "One number is enough: look at all gradients first, then ask all ranks once.\n" + ASK_ALL
    one_all_reduce(where, events, min(8, events[0].payload) if events else 4, hint)


def stepped(answer: Any, draw: random.Random, gradients: Gradients, shares: bool) -> None:
    """Whole steps, with an optimizer of two groups, beside the reference."""
    rank, seen, whole, inf, nan = gradients.rank, [], Look(), math.inf, math.nan
    model = [torch.nn.Parameter(torch.ones(shape)) for shape in gradients.shapes]
    own = [p for p, mine in zip(model, gradients.mine) if mine]
    groups = [{"params": half, "lr": 0.1 * n} for n, half in enumerate((own[::2], own[1::2]), 1)]
    optimizer = torch.optim.SGD([g for g in groups if g["params"]] or [{"params": []}], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(copies([p.grad for p in model])))
    options = {"init_scale": 2.0 ** draw.randrange(8, 12), "backoff_factor": 0.25,
               "growth_factor": draw.choice((2.0, 4.0)), "growth_interval": 2}
    mine, right = answer.LossScaler(**options), Reference(**options)
    for number, bad in enumerate((None, inf, None, -inf, nan, None, None, nan, None), start=1):
        where, scale, place = f"step {number}", right.scale, draw.randrange(len(model))
        where_bad = gradients.owners[place] if shares else draw.randrange(dist.get_world_size())
        none = draw.choice((None, (place + 1) % len(model)))
        clip = None if shares else draw.choice((draw.uniform(0.3, 0.6), 3.0))  # times the norm
        true = gradients.drawn(draw.getrandbits(31), torch.float32, none)
        loss = sum((p * g).sum() for p, g in zip(model, true) if g is not None)
        loss = loss + 0 * sum(p.sum() for p in model)
        kept = loss.detach().clone()
        scaled = mine.scale_loss(loss)
        if not bitwise_equal(loss, kept):
            raise Wrong(f"{where}: scale_loss changes the caller's loss: return another tensor.")
        close(f"{where}, scale {scale:g}", "the scaled loss", scaled, kept.double() * scale)
        scaled.backward()
        for parameter, gradient in zip(model, true):
            parameter.grad = None if gradient is None else parameter.grad
        if bad and where_bad == rank:
            model[place].grad.view(-1)[-1] = bad
        norm = float(sum(g.double().square().sum() for g in true if g is not None)) ** 0.5
        clip, before = clip and clip * norm, copies(model)
        with whole, Look() as look:
            made = mine.step(optimizer, clip) if clip else mine.step(optimizer)
        if bool(made) == bool(bad) or len(seen) != (not bad):
            told = f"rank {where_bad} has {bad} in a gradient" if bad else "all is finite"
            does = f"makes {len(seen)} steps of the optimizer and returns {made}"
            raise Wrong(
                f"{where}: {told}, and rank {rank} {does}.\nThe ranks do not agree, or nobody "
                "skips: what one rank finds is everybody's, also a NaN. Which ReduceOp says that?"
            )
        factor = min(1.0, clip / norm) if clip else 1.0
        for got, wanted in zip(seen.pop() if seen else [], true):
            if (got is None) != (wanted is None):
                raise Wrong(f"{where}: a gradient that was None is a tensor at the step, or not.")
            if got is not None:  # a hand's clipping has other last digits
                ratio = float(got.double().norm() / wanted.double().norm())
                hint = symptom(ratio, scale, factor)
                close(where, "a gradient at the step", got, wanted.double() * factor, slack=100,
                      hint=hint)
        if bad and not all(map(torch.equal, before, model)):
            raise Wrong(f"{where}: the step counts as skipped, but the weights have changed.")
        one_number(where, look.events)
        right.update(bool(bad))
        same_state(f"{where}, after {'an overflow' if bad else 'a good step'}", mine, right)
        optimizer.zero_grad()
        for parameter in model:
            parameter.grad = None
        del look, scaled
    kept = whole.kept(allowed=256)  # a message of one number may stay
    nothing_kept("after all steps", kept * (kept > 256))


def symptom(ratio: float, scale: float, factor: float) -> str:
    """ratio: of the gradient to the true one; factor: what clipping should make of it."""
    words = {
        scale: f"It is {scale:g} times too large, as much as the scale: it is not divided by it.",
        1.0: "It is right without clipping; `clip` is the largest norm that it may have.",
        **dict.fromkeys((0.25, 0.5, 2.0, 4.0), "Is it divided by the scale that the loss was "
                        "multiplied with? First unscale, then update."),
    }
    for like, told in words.items():
        if math.isclose(ratio, like, rel_tol=1e-3):
            return told
    if ratio < 0.9 * factor:
        return "It is too small. Are the gradients unscaled when they are clipped?"
    return "Divided by the scale, then clipped if asked, and nothing else?"


def beside_grad_scaler(answer: Any, options: dict, clip: float, seed: int) -> None:
    """On a rank: the answer's training and GradScaler's, step by step."""
    theirs = train(GradScaler(**options), clip, seed, steps=8)
    mine = train(answer.LossScaler(**options), clip, seed, steps=8)
    for number, (my, right) in enumerate(zip(mine, theirs), start=1):
        for name in ("scale", "stepped"):
            if my[name] != right[name]:
                raise Wrong(
                    f"DDP in fp16, step {number}: {name} is {my[name]}, GradScaler's {right[name]}."
                )
        close(f"DDP in fp16, step {number}", "the weights", my["weights"], right["weights"],
              slack=100)


# ---- exercise b: fp32 masters beside a plain fp32 reckoning

LARGE = 160  # rows and columns: two such parameters have more than 50,000 numbers
OPTIMIZERS = (
    ("SGD", {"momentum": 0.9}), ("SGD", {}), ("AdamW", {"weight_decay": 0.1}), ("AdamW", {}),
)
ROUNDED = (
    "Its gradient was right. Masters are kept for the whole training: what bf16 rounds away must\n"
    "not be read back from the parameters."
)


class Training:
    """In bf16, the same on whatever rank it is drawn. micro: micro-batches of each step; gaps: rank
    `odd` has no gradient for a parameter in step 0, and in step `empty` none at all; in the last
    step it has a NaN."""

    def __init__(self, seed: int, size: int, gaps: bool):
        draw, self.seed, self.gaps = random.Random(seed), seed, gaps
        large = size == 2 and not gaps
        self.shapes = [(draw.randrange(2, 9), draw.randrange(2, 9)) for _ in range(2)]
        self.shapes += [(LARGE, LARGE)] * 2 * large + [(draw.randrange(3, 30),)]
        self.micro = [2, 1, 1, 3, 1] if large else [3, 1, 10, 2, 4]
        draw.shuffle(self.micro)
        self.optimizer, options = draw.choice(OPTIMIZERS)
        self.options = options | {"lr": draw.uniform(0.005, 0.03)}
        self.odd, self.missing = draw.randrange(size), draw.randrange(len(self.shapes))
        self.empty = draw.randrange(1, len(self.micro) - 1)

    @property
    def numbers(self) -> int:
        return sum(map(math.prod, self.shapes))

    def start(self) -> list[torch.Tensor]:
        return [fractions(self.seed + n, *s).bfloat16() for n, s in enumerate(self.shapes)]

    def batches(self, step: int, rank: int) -> list[Tensors]:
        """What each backward pass of a step leaves on a rank."""
        odd, last = rank == self.odd, len(self.micro) - 1
        if self.gaps and odd and step == self.empty:
            return []
        found = []
        for micro in range(self.micro[step]):
            seed = self.seed + 100_000 * step + 1000 * micro + 10 * rank
            found.append([
                fractions(seed + n, *shape).bfloat16() for n, shape in enumerate(self.shapes)
            ])
            if self.gaps and odd and step == 0:
                found[-1][self.missing] = None
        if odd and step == last:
            found[0][-1][0] = math.nan
        return found

    def means(self, step: int, last: bool = False, bf16: bool = False) -> list[torch.Tensor]:
        """Over the ranks, in fp64. last: of the last micro-batches; bf16: added up so."""
        total = [torch.zeros(shape, dtype=torch.float64) for shape in self.shapes]
        size = dist.get_world_size()
        for rank in range(size):
            for number, several in enumerate(zip(*self.batches(step, rank))):
                parts = [part if bf16 else part.double() for part in several if part is not None]
                parts = parts[-1:] if last else parts
                total[number] += sum(parts[1:], parts[0]) / size if parts else 0
        return total


def master_weights(trial: Trial) -> str:
    """Judges the MasterWeights in the file."""
    for group in trial.groups(hang="Does every rank call the same collectives?"):
        for late in (False, True):
            plan = Training(trial.new_seed(), group.size, gaps=late)
            case = group.case(f"parameters of shapes {plan.shapes}")
            ranks = group.run(case, trained, plan, late=late)
            for step, found in enumerate(zip(*ranks), start=1):
                for number, tensors in enumerate(zip(*found)):
                    same_bits(f"{case}, step {step}", f"master or parameter {number}", tensors)
    return (
        "masters and parameters equal a plain fp32 reckoning on 1 to 6 ranks, for any number of\n"
        "micro-batches, also where a rank has no gradient; micro-batches are added up in fp32,\n"
        "and averaged in one fp32 message a step, also of 50,000 numbers; the model stays bf16,\n"
        "and no gradient outlives its step."
    )


def trained(answer: Any, plan: Training) -> list[list[torch.Tensor]]:
    """On a rank: masters and parameters after each step, all looked at."""
    rank, seen, found, whole = dist.get_rank(), [], [], Look()
    model = [torch.nn.Parameter(value) for value in plan.start()]
    kind = getattr(torch.optim, plan.optimizer)

    def make(masters: list[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = kind(masters, **plan.options)
        optimizer.register_step_pre_hook(lambda *_: seen.append(copies([m.grad for m in masters])))
        return optimizer

    answer.MasterWeights([torch.nn.Parameter(torch.ones(5).bfloat16())], make)  # beside ours
    optimizer = answer.MasterWeights((p for p in model), make)
    masters, twins = optimizer.masters, [value.float() for value in plan.start()]
    right_copies(masters, twins)
    twin = kind(twins, **plan.options)
    for step in range(len(plan.micro)):
        where = f"rank {rank}, step {step + 1}"
        with whole, Look() as look:
            for batch in plan.batches(step, rank):
                for parameter, gradient in zip(model, batch):
                    parameter.grad = gradient
                optimizer.collect()
                if any(p.grad is not None for p in model):
                    raise Wrong(
                        f"{where}: .grad of a parameter is not None after collect(): it takes "
                        "memory, and is counted again."
                    )
            collected = len(look.events)
            optimizer.step()
        if len(seen) != 1:
            raise Wrong(f"{where}: step() calls the optimizer {len(seen)} times.")
        if collected:
            op = look.events[0].op
            raise Wrong(f"{where}: collect() calls {op}; nobody needs the sum before step().")
        hint = (
            "One message, of all gradients in one flat fp32 tensor, saves latencies; in 16 bits "
            "each\naddition would be rounded. With none, each rank follows its own rows."
        )
        one_all_reduce(f"{where}, step()", look.events, 4 * plan.numbers, hint)
        right_means(where, plan, step, seen[0])
        for tensor, mean in zip(twins, seen.pop()):
            tensor.grad = mean
        twin.step()
        twin.zero_grad()
        right_weights(where, masters, model, twins)
        found.append(copies([*masters, *model]))
        batch = gradient = look = None
    allowed = 2 * 4 * plan.numbers  # a buffer of one's own may stay
    held = [t.data for t in (*model, *masters)], list(optimizer.optimizer.state.values())
    kept = whole.kept(*held, allowed=allowed)
    nothing_kept(f"rank {rank}, after all steps", kept * (kept > allowed))
    return found


def right_copies(masters: Any, start: list[torch.Tensor]) -> None:
    if not isinstance(masters, list | tuple) or len(masters) != len(start):
        raise Wrong(
            f"the masters are {described(masters)}; a list of {len(start)} tensors is asked for, "
            "one for each parameter."
        )
    for number, (master, value) in enumerate(zip(masters, start)):
        close("at the beginning", f"master {number}", master, value.double(), dtype=torch.float32)


def right_means(where: str, plan: Training, step: int, seen: Tensors) -> None:
    """What the inner optimizer has seen."""
    size, means = dist.get_world_size(), plan.means(step)
    symptoms = {
        f"It is {size} times the mean: the sum is not divided by the ranks.": [
            size * mean for mean in means
        ],
        "It is that of the last micro-batch alone: add up, do not overwrite.": plan.means(
            step, last=True
        ),
        "It was added up in bf16: turn each part into fp32 before you add it.": plan.means(
            step, bf16=True
        ),
    }
    for number, (got, right) in enumerate(zip(seen, means)):
        if got is None:
            raise Wrong(
                f"{where}: master {number} has no .grad at the optimizer's step. Where a rank has "
                "no gradient,\nit counts as zeros."
            )
        hint = "It should be the mean over the ranks of all micro-batches of this step, each once."
        for words, like in symptoms.items():
            if torch.allclose(got.double(), like[number], rtol=1e-4, atol=1e-6, equal_nan=True):
                hint = words
                break
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
                f"{where}: after step() masters still have a .grad: 4 bytes a parameter, and the "
                "next step would\nbegin with this step's gradients. None frees it."
            )


# ---- exercise c: rounding by chance, looked at often enough

BF16 = FORMATS["bf16"]
PARTS = (0.0012, 0.13, 0.5, 0.77, 0.996, 0.37)  # of the way up to the next bf16 number
# 1e-20 is made one of bf16; 2⁻¹³⁰ is subnormal, as 0.37 of the PARTS is made
SPECIAL = (0.0, 1.0, -2.5, 1e-20, 2.0**-130, -(2.0**-133), math.inf, -math.inf, math.nan)
TIMES = 40_000
RARE, MANY = 3, 2_000_000  # so many 2¹⁶ths of the way up, so often: ~90 of them go up
SIGMAS = 7  # a mean may be so many standard deviations away: once in 10¹¹ right answers
APART = (0, 1, 2_520_000, 2**20, 10**6)  # steps: a seed that begins anew after n steps shows here
OWN_CHANCE = "each needs a random number of its own."


def stochastic(trial: Trial) -> str:
    """Judges `round_stochastically` and `sgd_step` in the file."""
    values, seeds = numbers_to_round(trial.draw), [trial.new_seed() for _ in range(3)]
    trial.alone("round_stochastically", rounded, values, seeds)
    for group in trial.groups((2, 3, 1)):  # no formula depends on the number of ranks
        plan, case = Update(trial.new_seed(), missing=group.size != 2), group.case("sgd_step")
        ranks = group.run(case, updated, plan)
        for number, results in zip(plan.numbers, zip(*ranks)):
            for weights in zip(*results):
                hint = "Each rank rounds by its own chance; all need the same."
                same_bits(f"{case}, step {number}", "the weights", weights, hint)
        right_updates(case, plan, ranks[0])
    return (
        "each number goes to one of its two neighbours, and the mean is the number itself; a NaN\n"
        "and what bf16 can hold stay, subnormal numbers too; steps in bf16 lead as far as in\n"
        "exact arithmetic, each by chances of its own, two million steps apart too; 1, 2 and 3\n"
        "ranks keep the same weights, bit by bit, without a message."
    )


def numbers_to_round(draw: Any) -> list[float]:
    """Numbers between two of bf16, small and large, then special ones."""
    values = []
    for part in PARTS:
        low = draw.uniform(1, 1.99) * 10.0 ** draw.randrange(-20, 20)
        if part == PARTS[-1]:
            low = draw.uniform(1, 1.99) * 2.0 ** -draw.randrange(127, 132)
        low = (torch.tensor(low).view(torch.int32) & -(2**16)).view(torch.float32).double()
        value = (low + part * spacing(low, BF16)).float().item()
        values.append(value * draw.choice((-1, 1)))
    return values + [torch.tensor(value).bfloat16().item() for value in SPECIAL]


def ways(exact: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """How far away from zero each number was moved, in steps of bf16: −part or 1 − part."""
    return (got.double() - exact) * exact.sign() / spacing(exact.abs(), BF16)


def fair(where: str, exact: torch.Tensor, got: torch.Tensor, hint: str) -> None:
    """Each of `got` is a neighbour of its number, as often the upper one as it should be."""
    moved = ways(exact, got)
    if (off := moved.abs() > 1.001).any():
        told = f"{exact[off][0].item():.9g} becomes {got[off][0].item():.9g}"
        raise Wrong(
            f"{where}: {told}. Only the neighbour below and the neighbour above may come out.\n"
            "Is all of it computed in fp32?"
        )
    part = (exact.abs() / spacing(exact.abs(), BF16)) % 1
    spread = (part * (1 - part)).sum().sqrt()
    if moved.sum().abs() > SIGMAS * spread:
        raise Wrong(
            f"{where}: {len(exact):,} results are on average {float(moved.mean()):+.4f} steps of "
            f"bf16 away from the exact one.\n{hint}"
        )


def rounded(answer: Any, values: list[float], seeds: list[int]) -> None:
    """In a process of its own: each value many times, and what else is promised."""

    def ask(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        result = answer.round_stochastically(x, generator)
        hint = "Twice as long? torch's whole numbers have 64 bits by default: dtype=torch.int32."
        if not isinstance(result, torch.Tensor) or result.shape != x.shape:
            raise Wrong(f"for {tuple(x.shape)} numbers it returns {described(result)}.\n{hint}")
        if result.dtype != torch.bfloat16:
            raise Wrong(f"the result is {result.dtype}, and bf16 is wanted.\n{hint}")
        return result

    def by(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    x = torch.tensor(values).repeat(TIMES, 1)
    nan = x.view(torch.int32)[:, -1]
    nan[::2], nan[1::2] = 0x7FFFFFFF, 0x7F800001  # NaNs that carries and cuts destroy
    with Look(x=x) as look:
        result = ask(x, by(seeds[0]))
    unchanged("rounding", look.changed(), "Make a new tensor.")
    right_rounding(x.double(), result)
    for shape in ((), (0,), (2, 3, 4)):
        ask(fractions(seeds[2], *shape, dtype=torch.float32), by(seeds[2]))
    small = x[:50, : len(PARTS)].t()  # also where numbers do not lie one after the other
    chance = by(seeds[1])
    first, then = ask(small, chance), ask(small, chance)
    if not ask(small, by(seeds[1])).equal(first):
        raise Wrong(
            "The same generator state gives other results: take all chance from `generator`."
        )
    if then.equal(first) or ask(small, by(seeds[2])).equal(first):
        raise Wrong("A second call gives the same results: is the generator asked each time?")
    for i in range(len(PARTS), len(values)):
        close("what bf16 can hold must stay as it is", f"a result for {values[i]:g}", result[:, i],
              x[:, i].double(), slack=0)
    rare = torch.full((MANY,), 0x3F800000 + RARE, dtype=torch.int32).view(torch.float32)
    hint = "Are there as many random bits as bits that are cut off?"
    fair(f"1 + {RARE} · 2⁻²³", rare.double(), ask(rare, by(seeds[2])), hint)


def right_rounding(exact: torch.Tensor, got: torch.Tensor) -> None:
    """exact and got (TIMES, values); the first values lie between two of bf16."""
    inner = len(PARTS)
    moved = ways(exact[:, :inner], got[:, :inner])
    if all(len(column.unique()) == 1 for column in moved.T):
        raise Wrong(
            f"{exact[0, 2].item():.9g} is always rounded to {got[0, 2].item():g}: where is the "
            f"chance?\nOr do all numbers of a tensor share one? Then {OWN_CHANCE}"
        )
    if ((moved.mean(dim=0) - 0.5).abs() < 0.1).all():
        raise Wrong(
            "On average the results are half a step too large: you add the random bits and then "
            "round to the nearest.\nCut the lower 16 bits off instead."
        )
    hint = "The chance to go up must be the part of the way up."
    for i in range(inner):
        fair(f"{exact[0, i].item():.9g}", exact[:, i], got[:, i], hint)
    one = moved[:, 2] - moved[:, 2].mean()  # the most random ones
    other = moved[:, 3] - moved[:, 3].mean()
    for what, beside_it in (("below", one.roll(1)), ("beside", other)):
        together = float((one * beside_it).mean() / (one.std() * beside_it.std()))
        if abs(together) > SIGMAS / math.sqrt(TIMES):
            raise Wrong(
                f"A number and the one {what} it in the tensor go up together (correlation "
                f"{together:+.2f}): {OWN_CHANCE}"
            )


class Update:
    """Of four parameters, the first two alike; of parameter 2 the gradient may be missing. numbers:
    of steps, not in order."""

    def __init__(self, seed: int, missing: bool):
        draw, first = random.Random(seed), seed % 100
        alike, last = (draw.randrange(20, 40), 30), 50_000 * missing + draw.randrange(200, 300)
        self.weights, self.grads, self.lr = [], [], draw.uniform(0.1, 0.9)
        for index, shape in enumerate((alike, alike, (draw.randrange(5, 9),), (last,))):
            own, size = seed + max(index, 1), 0.004 if index < 2 else 1.0  # small or large moves
            weight = fractions(own, *shape).sign() + 0.3 * fractions(own + 50, *shape)
            self.weights.append(weight.bfloat16())
            self.grads.append((size * fractions(own + 90, *shape)).bfloat16())
        self.grads[2] = None if missing else self.grads[2]
        self.numbers = [first + apart for apart in draw.sample(APART, len(APART))]


def updated(answer: Any, plan: Update) -> list[list[torch.Tensor]]:
    """On a rank: the parameters after each step, always from the same weights. Rank 0 was started
    later than the others."""
    results, earlier = [], torch.nn.Parameter(plan.weights[0].clone())
    earlier.grad = plan.grads[0]
    if dist.get_rank():
        answer.sgd_step([earlier], plan.lr, plan.numbers[0], dist.get_rank())
    for number in plan.numbers:
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
                "do all of them know?"
            )
        results.append(copies(parameters))
    return results


def right_updates(case: str, plan: Update, results: list[list[torch.Tensor]]) -> None:
    if results[0][0].equal(plan.weights[0] - plan.lr * plan.grads[0]):
        raise Wrong(
            f"{case}: is the new weight computed in bf16? Then it is rounded to the nearest before "
            "you can round it:\ngo to fp32 first."
        )
    for one, other in itertools.combinations(range(len(results)), 2):
        if results[one][0].equal(results[other][0]):
            raise Wrong(
                f"{case}: the same numbers are rounded up in every step, or at least in the steps\n"
                f"{plan.numbers[one]:,} and {plan.numbers[other]:,}: new chances each step."
            )
    if results[0][0].equal(results[0][1]):
        raise Wrong(f"{case}: two parameters are rounded by the same chances: one after the other.")
    exact, found, back = [], [], []
    for result in results:
        for weight, grad, got in zip(plan.weights, plan.grads, result):
            if grad is None:
                close(case, "a parameter without a gradient", got, weight, slack=0)
                continue
            right = (weight.float() - plan.lr * grad.float()).double().flatten()
            some = right.abs() > weight.flatten().abs() / 32  # else the product's rounding counts
            exact.append(right[some])
            found.append(got.flatten()[some])
            back.append((weight.float() + plan.lr * grad.float()).double().flatten()[some])
    exact, found, back = map(torch.cat, (exact, found, back))
    if (ways(back, found).abs() < 1.001).all():
        raise Wrong(f"{case}: the weights go the other way.")
    part = (exact.abs() / spacing(exact.abs(), BF16)) % 1
    hint = "Is the new weight computed in fp32, and rounded only by round_stochastically?"
    for half in (part < 0.5, part >= 0.5):
        fair(case, exact[half], found[half], hint)
