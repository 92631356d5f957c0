"""Given: what the check cell of exercise 03b looks at.

Ranks hand bf16 gradients that the judge knows to your MasterWeights, step by step. What the inner
optimizer sees, the masters, the parameters, the messages and what is left in memory are compared
with a plain fp32 reckoning.
"""

import itertools
import math
import weakref

import torch
import torch.distributed as dist

from utils.course.assertions import Wrong, bitwise_equal, close, described, same_bits
from utils.course.observe import Look
from utils.course.runner import Trial, fractions

HANG = "Does every rank call the same collectives?"
MICRO = (3, 1, 10, 2, 4)  # micro-batches of the steps
LARGE = 160  # rows and columns: two such parameters have more than 50,000 numbers
OPTIMIZERS = (
    ("SGD", {"momentum": 0.9}), ("SGD", {}), ("AdamW", {"weight_decay": 0.1}), ("AdamW", {}),
)


def master_weights(trial: Trial) -> str:
    """Judges the MasterWeights in the file."""
    for group in trial.groups(hang=HANG):
        for late in (False, True):
            drawn = _draw(trial, group.size, gaps=late, large=group.size == 2 and not late)
            case = group.case(f"parameters of shapes {drawn['shapes']}")
            _right(case, group.run(case, _train, drawn, late=late), drawn)
    return (
        "masters and parameters equal a plain fp32 reckoning on 1 to 6 ranks, for any number of\n"
        "micro-batches, also where a rank has no gradient; micro-batches are added up in fp32,\n"
        "and averaged in one fp32 message a step, also of 50,000 numbers; the model stays bf16,\n"
        "and no gradient outlives its step."
    )


def _draw(trial: Trial, size: int, gaps: bool, large: bool) -> dict:
    """A training. gaps: one rank has no gradient for one parameter, and once none at all."""
    draw = trial.draw
    shapes = [(draw.randrange(2, 9), draw.randrange(2, 9)) for _ in range(draw.randrange(1, 4))]
    shapes += [(LARGE, LARGE)] * 2 * large + [(draw.randrange(3, 30),)]
    name, options = draw.choice(OPTIMIZERS)
    micro = [2, 1, 1, 3, 1] if large else list(MICRO)
    draw.shuffle(micro)
    return {
        "shapes": shapes, "seed": trial.new_seed(), "micro": micro, "odd": draw.randrange(size),
        "empty": draw.randrange(1, len(micro) - 1), "optimizer": name,
        "options": options | {"lr": draw.uniform(0.005, 0.03)},
        "missing": draw.randrange(len(shapes)), "gaps": gaps,
    }


def _gradients(drawn: dict, step: int, micro: int, rank: int) -> list[torch.Tensor | None]:
    """What the backward pass of a micro-batch leaves on a rank; in the last step, one NaN."""
    grads = []
    for number, shape in enumerate(drawn["shapes"]):
        seed = drawn["seed"] + 100_000 * step + 1000 * micro + 10 * rank + number
        grads.append(fractions(seed, *shape).bfloat16())
    if drawn["gaps"] and (step, rank) == (0, drawn["odd"]):
        grads[drawn["missing"]] = None
    if (step, micro, rank) == (len(drawn["micro"]) - 1, 0, drawn["odd"]):
        grads[-1][0] = math.nan
    return grads


def _micro(drawn: dict, step: int, rank: int) -> int:
    """How many micro-batches a rank has: in one step, one rank has none."""
    none = drawn["gaps"] and (step, rank) == (drawn["empty"], drawn["odd"])
    return 0 if none else drawn["micro"][step]


def _train(answer, drawn: dict) -> list[dict]:
    """On a rank: the steps of two MasterWeights in turns, of which one is looked at."""
    rank, seen = dist.get_rank(), []
    start = [fractions(drawn["seed"] + n, *s).bfloat16() for n, s in enumerate(drawn["shapes"])]
    model = [torch.nn.Parameter(value.clone()) for value in start]
    kind = getattr(torch.optim, drawn["optimizer"])

    def make(masters):
        optimizer = kind(masters, **drawn["options"])
        optimizer.register_step_pre_hook(lambda *_: seen.append([_copy(m.grad) for m in masters]))
        return optimizer

    other = torch.nn.Parameter(torch.ones(5).bfloat16())
    beside = answer.MasterWeights([other], lambda masters: torch.optim.SGD(masters, lr=0.5))
    optimizer = answer.MasterWeights((p for p in model), make)
    masters, whole = optimizer.masters, Look()
    _right_copies(masters, start, model)
    twins = [value.float() for value in start]
    same = kind(twins, **drawn["options"])
    rows = []
    for step in range(len(drawn["micro"])):
        where = f"step {step + 1}"
        collecting, given = Look(), []
        for micro in range(_micro(drawn, step, rank)):
            other.grad = torch.ones(5).bfloat16()
            with whole, collecting:
                beside.collect()
            for parameter, grad in zip(model, _gradients(drawn, step, micro, rank)):
                parameter.grad = grad
                given += [] if grad is None else [weakref.ref(grad)]
            del grad
            with whole, collecting:
                optimizer.collect()
            left = [n for n, p in enumerate(model) if p.grad is not None]
            if left:
                raise Wrong(
                    f"{where}: .grad of parameter {left[0]} is not None after collect(): it takes "
                    "memory, and is counted again."
                )
        if collecting.events:
            raise Wrong(
                f"{where}: collect() calls {collecting.events[0].op}; nobody needs the sum before "
                "step()."
            )
        row = {"sums": [_copy(master.grad) for master in masters]}
        with whole, Look() as look:
            optimizer.step()
        with whole:
            beside.step()
        if any(grad() is not None for grad in given):
            raise Wrong(
                f"{where}: after the step bf16 gradients are still held, though no `.grad` has "
                "them. Who keeps them, and for what?"
            )
        if len(seen) != 1:
            raise Wrong(f"{where}: step() calls the optimizer {len(seen)} times.")
        row["means"] = seen.pop()
        for twin, mean in zip(twins, row["means"]):
            twin.grad = None if mean is None else mean.clone()
        same.step()
        _right_types(where, masters, model)
        row |= {
            "events": [(event.op, event.payload) for event in look.events],
            "masters": [master.detach().clone() for master in masters],
            "twins": [twin.clone() for twin in twins],
            "parameters": [p.detach().clone() for p in model],
            "left": [n for n, master in enumerate(masters) if master.grad is not None],
        }
        rows.append(row)
        del look, collecting
    state = [list(optimizer.optimizer.state.values()), list(beside.optimizer.state.values())]
    held = [p.data for p in model] + [m.data for m in masters] + [other.data]
    held += [m.data for m in beside.masters]
    rows[-1]["kept"] = whole.kept(state, held, [row["means"] for row in rows])
    return rows


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _right_copies(masters, start: list, model: list) -> None:
    if not isinstance(masters, list | tuple) or not all(
        isinstance(master, torch.Tensor) for master in masters
    ):
        raise Wrong(f"the masters are {described(masters)}; a list of tensors is asked for.")
    if [master.shape for master in masters] != [value.shape for value in start]:
        raise Wrong(f"{len(masters)} masters do not have the shapes of {len(start)} parameters.")
    for number, (master, value) in enumerate(zip(masters, start)):
        close("at the beginning", f"master {number}", master, value.double(), dtype=torch.float32)
    places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in [*masters, *model])
    if any(end > begin for (_, end), (begin, _) in itertools.pairwise(places)):
        raise Wrong("the masters share memory with something: each needs memory of its own.")


def _right_types(where: str, masters: list, model: list) -> None:
    for tensors, dtype, what in (
        (masters, torch.float32, "masters"), (model, torch.bfloat16, "model's parameters"),
    ):
        wrong = {str(t.dtype).split(".")[1] for t in tensors if t.dtype != dtype}
        if wrong:
            right = str(dtype).split(".")[1]
            raise Wrong(f"{where}: the {what} are {' and '.join(sorted(wrong))}, not {right}.")


def _right(case: str, ranks: list[list[dict]], drawn: dict) -> None:
    size, count = len(ranks), sum(map(math.prod, drawn["shapes"]))
    for step, rows in enumerate(zip(*ranks)):
        wheres = [f"{case}, rank {rank}, step {step + 1}" for rank in range(size)]
        sums = []
        for rank, (where, row) in enumerate(zip(wheres, rows)):
            parts = [_gradients(drawn, step, m, rank) for m in range(_micro(drawn, step, rank))]
            sums.append(_right_sums(where, row["sums"], parts, drawn["shapes"]))
            _right_messages(where, row["events"], count, size)
        for where, row in zip(wheres, rows):
            for number, mean in enumerate(row["means"]):
                right = sum(own[number] for own in sums) / size
                _right_mean(where, number, mean, right, size)
                hint = (
                    "Its gradient was right. Masters are kept for the whole training: what bf16 "
                    "rounds away must\nnot be read back from the parameters."
                )
                twin = row["twins"][number].double()
                close(where, f"master {number}", row["masters"][number], twin, hint=hint)
            _right_parameters(where, row)
        for number in range(len(drawn["shapes"])):
            for what in ("masters", "parameters"):
                same_bits(case, f"{what} {number}", [row[what][number] for row in rows])
    for rank, rows in enumerate(ranks):
        if rows[-1]["kept"] > 2 * 4 * (count + 5):  # a buffer of one's own may stay
            raise Wrong(
                f"{case}, rank {rank}: after {len(rows)} steps {rows[-1]['kept']:,} bytes of what "
                "was made are still held.\nWho keeps them, and for what?"
            )


def _right_sums(where: str, seen: list, parts: list, shapes: list) -> list[torch.Tensor]:
    """The masters' gradients after the last collect(); returns the right ones."""
    right = []
    for number, shape in enumerate(shapes):
        column = [part[number] for part in parts if part[number] is not None]
        total = sum((part.double() for part in column), torch.zeros(shape, dtype=torch.float64))
        right.append(total)
        if seen[number] is None:
            if column:
                raise Wrong(f"{where}: after collect() master {number} has no .grad.")
            continue
        hint = "Is each micro-batch added once, and nothing left of the step before?"
        if column and bitwise_equal(seen[number], column[-1].float()):
            hint = "It is that of the last micro-batch alone: add up, do not overwrite."
        elif column and torch.equal(seen[number], _in_bf16(column)):
            hint = "It was added up in bf16: turn each part into fp32 before you add it."
        close(where, f".grad of master {number}", seen[number], total, dtype=torch.float32,
              hint=hint)
    return right


def _in_bf16(column: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(column[0])
    for part in column:
        total = total + part
    return total.float()


def _right_messages(where: str, events: list, count: int, size: int) -> None:
    if not events:
        if size == 1:
            return
        raise Wrong(f"{where}: step() calls no all-reduce: each rank follows its own rows.")
    if other := sorted({op for op, _ in events} - {"all_reduce"}):
        raise Wrong(f"{where}: step() calls {', '.join(other)}; one all-reduce is enough.")
    if len(events) > 1:
        raise Wrong(
            f"{where}: step() sends {len(events)} messages. One message, of all gradients in one "
            "flat tensor, saves their latencies."
        )
    payload = events[0][1]
    if payload != 4 * count:
        hint = "\nIn 16 bits the sum over the ranks is rounded at each addition."
        raise Wrong(
            f"{where}: the all-reduce has {payload} bytes, and {count} fp32 gradients have "
            f"{4 * count}.{hint * (payload < 4 * count)}"
        )


def _right_mean(where: str, number: int, mean, right: torch.Tensor, size: int) -> None:
    """What the inner optimizer has seen."""
    if mean is None:
        raise Wrong(
            f"{where}: master {number} has no .grad at the optimizer's step. Where a rank has no "
            "gradient,\nit counts as zeros."
        )
    hint = "It should be the mean of all ranks' gradients."
    if size > 1 and torch.allclose(mean.double(), size * right, rtol=1e-4, equal_nan=True):
        hint = f"It is {size} times the mean: the sum is not divided by the ranks."
    what = f".grad of master {number} at the optimizer's step"
    close(where, what, mean, right, dtype=torch.float32, hint=hint)


def _right_parameters(where: str, row: dict) -> None:
    for number, (mine, master) in enumerate(zip(row["parameters"], row["masters"])):
        close(where, f"parameter {number}", mine, master.bfloat16().double(), slack=0,
              hint="It should be its master, rounded to the nearest bf16 number.")
    if row["left"]:
        raise Wrong(
            f"{where}: after step() masters still have a .grad: 4 bytes a parameter, and the next "
            "step would\nbegin with this step's gradients. None frees it."
        )
