"""Given: the three broken programs of each learner's number, and what is wrong with them.

    programs.hand_out()                        # writes them into the learner's folder
    programs.slow(17).text                     # the program of learner 17
    programs.slow(17).truth                    # what is planted in it

Each is a sound program in which a fault has replaced a few lines; which fault, at which rank and
step, and where the parts stand is drawn from the number. "#@tag" marks lines, and is taken out.
(Whoever reads on knows how the riddles are made. The answers to yours are not here.)
"""

import math
import random
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from labs.support.profiling.machine import ROWS, SERVICES, Troubles

RANKS = 4  # that the programs are run on
STEPS = 8
LARGE = 4.0  # a gradient's norm, far above the usual one
OUTLIER = 300.0  # a target far above the usual ones: its gradient is large
SPIKE = 1e6  # a loss that is no loss
HUGE = 1e5  # a target that makes one


@dataclass(frozen=True)
class Program:
    """text: of the file; sound: the same without its fault; truth: what is wrong; widths: of the
    learner's network.

    troubles: of the machine that it is broken on; ms: {rank that is late: {service: ms}}.
    """

    text: str
    sound: str
    truth: dict[str, Any]
    widths: tuple[int, ...]
    troubles: Troubles
    ms: dict[int, dict[str, float]]


# ---- 1. a learner's number, and her folder


def number_in(folder: str | Path) -> int:
    """The NUMBER in folder/diagnosis.py; NotImplementedError with the task where there is none."""
    text = (Path(folder) / "diagnosis.py").read_text(encoding="utf-8")
    found = re.findall(r"^(?:# (.*)\n)?NUMBER\b[^=\n]*=\s*([^#\n]*)", text, re.MULTILINE)
    task, value = found[-1] if found else ("", "")
    if value.strip() == "None":
        raise NotImplementedError(task)
    if not value.strip().isdecimal() or not 1 <= int(value) <= 999_999:
        raise ValueError(
            "diagnosis.py: write NUMBER = 17, or another integer up to 999999, on its own line"
        )
    return int(value)


def hand_out(folder: str | Path = ".") -> None:
    """Write broken/slow.py, broken/hanging.py and broken/wrong.py for the number in diagnosis.py,
    and replace each stub that the learner has not touched by a copy."""
    folder = Path(folder)
    try:
        number = number_in(folder)
    except (NotImplementedError, ValueError, OSError) as error:
        print(f"Nothing is handed out yet: {error}.")
        return
    (folder / "broken").mkdir(exist_ok=True)
    print(f"You are learner {number}.")
    for name, program in FAULTY.items():
        text, own = program(number).text, folder / f"{name}.py"
        (folder / "broken" / f"{name}.py").write_text(text, encoding="utf-8")
        if not_begun(own):
            own.write_text(text, encoding="utf-8")
            print(f"broken/{name}.py is handed out, and {name}.py is your copy, to be fixed.")
        else:
            print(f"broken/{name}.py is handed out; {name}.py is yours and stays as it is.")


def not_begun(path: Path) -> bool:
    """Whether there is no file, or a stub."""
    return not path.exists() or "\n    raise NotImplementedError" in path.read_text("utf-8")


# ---- 2. what all programs share

HEAD = '''\
"""The {name} program of learner {number}: {about}
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
{imports}
'''
NETWORK = '''
def network():
    """The same on every rank."""
    torch.manual_seed(SEED)
    layers = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
'''
Edits = list[tuple[str, str]]  # (lines that occur once, what stands in their place)


def sizes_of(widths: tuple[int, ...]) -> list[int]:
    """Numbers in each parameter: weight, bias, weight, bias …"""
    return [size for a, b in pairwise(widths) for size in (a * b, b)]


def _settings(draw: random.Random) -> dict[str, Any]:
    """What each learner's network and training are."""
    ranges = ((4, 8), (10, 17), (17, 23), (9, 16), (2, 4))
    widths = tuple(draw.randrange(*ends) for ends in ranges)
    seed, lr = draw.randrange(10_000), draw.randrange(5, 15) / 100
    return {"WIDTHS": widths, "LR": lr, "SEED": seed, "MICRO_BATCHES": draw.choice((2, 3))}


def _put_together(
    draw: random.Random, head: str, constants: dict[str, Any], body: str, fault: Edits
) -> tuple[str, str, dict[str, list[int]]]:
    """The text of a program, the sound one, and {tag: lines} of the first. body: its functions,
    of which the last one is `train`."""
    constants = [f"{name} = {value}" for name, value in constants.items() if name in body]
    *functions, train = body.strip("\n").split("\n\n\n")
    draw.shuffle(constants)
    draw.shuffle(functions)
    parts = [head + "\n" + "\n".join(constants), *functions, train]
    sound = text = "\n\n\n".join(parts) + "\n"
    for old, new in fault:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    lines = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for tag in re.findall(r"#@(\w+)", line):
            lines.setdefault(tag, []).append(number)
    return *(re.sub(r" +#@\w+", "", one) for one in (text, sound)), lines


# ---- 3. slow

LATE = {
    "unpack": "data loading", "save": "checkpoints", "log": "logging",
    "temperature": "health checks",
}
SLOW_ABOUT = """ranks train one network, and a step takes too long.

train(machine, steps) runs on every rank. The loss is the mean over the rows of all ranks, and all
end with the same weights. What the machine's services need is said in
labs/support/profiling/machine.py."""
SLOW = '''
class Rows(Dataset):
    """This rank's rows, an item for each step."""

    def __init__(self, machine, steps):
        self.machine, self.steps = machine, steps

    def __len__(self):
        return self.steps

    def __getitem__(self, step):
        packed = self.machine.read(step)
        return self.machine.unpack(packed)  #@unpack

''' + NETWORK + '''

def reduce(model, optimizer, loss):
    """The loss, a mean over the ranks; the gradients become means in their place."""
    tensors = [p.grad for p in model.parameters()]
    flat = torch.cat([loss.view(1), *[tensor.flatten() for tensor in tensors]])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [1, *[tensor.numel() for tensor in tensors]]
    for tensor, part in zip(tensors, flat.split(sizes)[1:]):
        tensor.copy_(part.view_as(tensor))
    return flat[0]


def train(machine, steps, after=lambda model: None):
    """The loss of each step. `after(model)` is called at the end of each, on every rank."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    for step, (x, y) in enumerate(DataLoader(Rows(machine, steps), batch_size=None)):
<services>
        after(model)
    return losses
'''
LEARN = """
        loss = torch.zeros((), dtype=torch.float64)
        for rows, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
            part = (model(rows) - targets).square().sum() / y.numel()
            part.backward()
            loss += part.detach()
        loss = reduce(model, optimizer, loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
"""
ASKED = {  # before and after the step's own work
    "temperature": """
        if machine.temperature(step) > 90:  #@temperature
            raise RuntimeError(f"rank {dist.get_rank()} is too hot")
""",
    "log": '        machine.log(f"step {step}: loss {losses[-1]:.6f}")  #@log',
    "save": "        machine.save(step, model)  #@save",
}
ADD = "            loss += part.detach()\n"
FLAT = "    flat = torch.cat([loss.view(1), *[tensor.flatten() for tensor in tensors]])"
REDUCE = "    dist.all_reduce(flat)"
MESSAGES: dict[str, Edits] = {
    "one for each parameter": [
        (SLOW[SLOW.index(FLAT) : SLOW.index("    return flat[0]")], """\
    loss = loss.clone()
    for tensor in [loss, *tensors]:  #@messages
        dist.all_reduce(tensor)  #@messages
        tensor /= dist.get_world_size()
"""),
        ("    return flat[0]", "    return loss"),
    ],
    "one for each micro-batch": [
        (FLAT, f"{FLAT}  #@messages"),  # the call and the message, both are the place
        (REDUCE, f"{REDUCE}  #@messages"),
        ("        for rows, targets", """\
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rows, targets"""),
        (ADD, """\
            loss += reduce(model, optimizer, part.detach())  #@messages
            for so_far, p in zip(total, model.parameters()):
                so_far += p.grad
                p.grad = None
"""),
        ("        loss = reduce(model, optimizer, loss)\n", """\
        for so_far, p in zip(total, model.parameters()):
            p.grad = so_far
"""),
    ],
    "more than the gradients": [
        (FLAT, f"""\
    for p in model.parameters():  #@messages
        tensors += [v for v in optimizer.state[p].values() if v is not None]  #@messages
{FLAT}  #@messages"""),
        (REDUCE, f"{REDUCE}  #@messages"),
    ],
    "the loss of each micro-batch": [
        (ADD, """\
            part = part.detach()
            dist.all_reduce(part)  #@messages
            loss += part / dist.get_world_size()
"""),
        ("        loss = reduce(", "        reduce("),
    ],
    "barriers": [(ADD, f"{ADD}            dist.barrier()  #@messages\n")],
}


def slow(number: int) -> Program:
    """The slow program of a learner."""
    draw = random.Random(f"slow {number}")
    settings = _settings(draw)
    service, rank = draw.choice(SERVICES), draw.randrange(RANKS)
    ms = round(math.exp(draw.uniform(math.log(25), math.log(140))))
    cause = draw.choice(list(MESSAGES))
    after = ["log", "save"]
    draw.shuffle(after)
    loop = [LEARN, *[ASKED[name] for name in after]]
    loop.insert(0 if draw.random() < 0.5 else draw.randrange(1, 4), ASKED["temperature"])
    text, sound, lines = _put_together(
        draw,
        HEAD.format(name="slow", number=number, about=SLOW_ABOUT,
                    imports="from torch.utils.data import DataLoader, Dataset"),
        settings, SLOW.replace("<services>", "\n".join(part.strip("\n") for part in loop)),
        MESSAGES[cause],
    )
    sizes, micro = sizes_of(settings["WIDTHS"]), settings["MICRO_BATCHES"]
    gradients = 8 * sum(sizes)
    calls, size = {  # a step
        "one for each parameter": (1 + len(sizes), 8 + gradients),
        "one for each micro-batch": (micro, micro * (8 + gradients)),
        "more than the gradients": (1, 8 + 2 * gradients),
        "the loss of each micro-batch": (1 + micro, 8 * micro + 8 + gradients),
        "barriers": (1 + micro, 8 + gradients),
    }[cause]
    truth = {
        "rank": rank, "line": lines[service], "cause": LATE[service], "ms": ms,
        "message_line": lines["messages"], "message_cause": cause, "message_calls": calls,
        "message_bytes": size,
    }
    ms_of = {rank: {service: float(ms)}}
    return Program(text, sound, truth, settings["WIDTHS"], Troubles(), ms_of)


# ---- 4. hanging

HANGING_ABOUT = """ranks train one network, until they stand still.

train(machine, steps) runs on every rank. The loss is the mean over the rows of all ranks that
count; a step in which no row of any rank counts is left out; when one rank is asked to stop, all
stop after that step. Every rank returns the same."""
HANGING = NETWORK + '''

def reduce(model, loss, group):
    """The loss of all ranks; the gradients become sums in their place."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([loss.view(1), *[grad.flatten() for grad in grads]])
    dist.all_reduce(flat, group=group)  #@reduce
    for grad, part in zip(grads, flat[1:].split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))
    return flat[0]


def worst(errors, group):
    """The largest error of a row, of all ranks."""
    value = errors.detach().max().view(1)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value.item()


def score(machine, model, group):
    """The mean loss of all ranks on held-out rows."""
    value = machine.score(model)
    dist.all_reduce(value, group=group)
    return value.item() / dist.get_world_size()


def whole_error(value, first, second):
    """The sum over the ranks."""
    dist.all_reduce(value, group=first)  #@error
    return value.item()


def largest(value, first, second):
    """The largest of all ranks."""
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=second)
    return value.item()


def train(machine, steps):
    """A dictionary for each step that was done."""
    rank = dist.get_rank()
    first, second, third, fourth = (dist.new_group() for _ in range(4))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    done = []
    for step in range(steps):
        x, y, counts = machine.rows(step)
        number = counts.sum().view(1)
        all_numbers = number.clone()
        dist.all_reduce(all_numbers, group=first)  #@numbers
        if not all_numbers:
            continue
        errors = (model(x) - y).square().mean(dim=1) * counts
        (errors.sum() / all_numbers).backward()
        loss = reduce(model, errors.detach().sum() / all_numbers, second)
        row = {"step": step, "loss": loss.item()}
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        if norm > LARGE:
            row["worst"] = worst(errors, third)
        optimizer.step()
        optimizer.zero_grad()
        for name, value in sorted(machine.metrics(step, errors.detach()).items()):
            row[name] = (whole_error if name == "error" else largest)(value, first, second)
        if step % OFTEN == OFTEN - 1:
            row["score"] = score(machine, model, fourth)
        done.append(row)
        stop = torch.tensor([float(machine.asked_to_stop(step))])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=second)  #@stopping
        if stop:
            break
    return done
'''
NORM = "        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()\n"
LOSS = "        loss = reduce(model, errors"
WORST = '            row["worst"] = worst(errors, third)'
ROW = '            row[name] = (whole_error if name == "error" else largest)(value, first, second)'
STOP = HANGING[HANGING.index("        stop = torch") : HANGING.index("    return done")]
HANGS: dict[str, tuple[str, Edits]] = {  # tag of the line in which the others wait, and the fault
    "skips a collective": ("reduce", [
        ("        if not all_numbers:\n            continue",
         "        if not number:  #@fault\n            continue  #@fault"),
    ]),
    "decides alone": ("error", [
        (NORM, ""), (LOSS, NORM + LOSS),
        ("        if norm > LARGE:", "        if norm > LARGE:  #@fault"),
        (WORST, f"{WORST}  #@fault"),
    ]),
    "leaves the loop": ("numbers", [
        (STOP, "        if machine.asked_to_stop(step):  #@fault\n            break  #@fault\n"),
    ]),
    "another order": ("error", [
        ("in sorted(machine.metrics(step, errors.detach()).items()):",
         "in machine.metrics(step, errors.detach()).items():  #@fault"),
        (ROW, f"{ROW}  #@fault"),
    ]),
    "calls it alone": ("stopping", [
        ('            row["score"] = score(machine, model, fourth)', """\
            if rank == machine.leader:  #@fault
                row["score"] = score(machine, model, fourth)  #@fault"""),
    ]),
}


def hanging(number: int) -> Program:
    """The hanging program of a learner."""
    draw = random.Random(f"hanging {number}")
    constants = _settings(draw)
    cause, rank, step = draw.choice(list(HANGS)), draw.randrange(RANKS), draw.randrange(2, 6)
    often = draw.randrange(2, 5)
    waits, fault = HANGS[cause]
    text, sound, lines = _put_together(
        draw, HEAD.format(name="hanging", number=number, about=HANGING_ABOUT, imports="")[:-1],
        constants | {"LARGE": LARGE, "OFTEN": often}, HANGING, fault,
    )
    troubles = {
        "skips a collective": Troubles(silent={step: tuple(range(rank, ROWS, RANKS))}),
        "decides alone": Troubles(outliers={step: {draw.randrange(rank, ROWS, RANKS): OUTLIER}}),
        "leaves the loop": Troubles(stops={step: (rank,)}),
        "another order": Troubles(turned={step: rank}),
        "calls it alone": Troubles(leader=rank),
    }[cause]
    truth = {"rank": rank, "line": lines["fault"], "waits": lines[waits], "cause": cause}
    return Program(text, sound, truth, constants["WIDTHS"], troubles, {})


# ---- 5. wrong

WRONG_ABOUT = """on several ranks it learns something else than on one.

train(machine, steps) runs on every rank. The loss is the mean over the rows of all ranks. The
gradient of all rows is clipped to the norm LARGE; a step whose loss is SPIKE or more is left out.
All ranks end with the same weights."""
WRONG = NETWORK.replace("SEED", "SEED + dist.get_rank()").replace(
    "The same on every rank.", "Every rank begins with weights of its own."
) + '''

def send(model):
    """All ranks begin with the weights of rank 0."""
    parameters = list(model.parameters())
    for first, end in <sent>:  #@sent
        for p in parameters[first:end]:  #@sent
            dist.broadcast(p.data, 0)  #@sent


def reduce(model, loss):
    """The loss, a mean over the ranks; the gradients become means in their place."""
    parameters = list(model.parameters())
    for first, end in <reduced>:  #@reduced
        mean([p.grad for p in parameters[first:end]])  #@reduced
    tail = torch.cat([loss.view(1), *[p.grad.flatten() for p in parameters[LAST:]]])  #@divide
    dist.all_reduce(tail)  #@divide
    tail /= dist.get_world_size()
    sizes = [p.numel() for p in parameters[LAST:]]  #@divide
    for p, part in zip(parameters[LAST:], tail[1:].split(sizes)):  #@divide
        p.grad.copy_(part.view_as(p))  #@divide
    return tail[0]


def mean(tensors):
    """These tensors become means over the ranks, in one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


def train(machine, steps, watching=unwatched):
    """The loss of each step. `watching(model)` may be a `utils.measure.divergence.Watch`."""
    model = network()
    send(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    with watching(model) as watch:
        for step in range(steps):
            x, y, _ = machine.rows(step)
            loss = (model(x) - y).square().mean()
            loss.backward()
            own = loss.detach().clone()
            loss = reduce(model, own)
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGE)
            watch.step()
            if loss < SPIKE:
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses
'''
CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGE)"
REDUCED = "            loss = reduce(model, own)\n"
WRONGS = (
    "weights not sent", "gradient not reduced", "sum not divided", "clipped alone",
    "step left out alone",
)


def wrong(number: int) -> Program:
    """The wrong program of a learner."""
    draw = random.Random(f"wrong {number}")
    constants = _settings(draw)
    cause, rank, step = draw.choice(WRONGS), draw.randrange(RANKS), draw.randrange(2, 6)
    names = [f"{2 * layer}.{kind}" for layer in range(4) for kind in ("weight", "bias")]
    last = len(names) - draw.randrange(1, 4)  # from here on: the tail, in a message of its own
    unsent = draw.randrange(1, len(names) - 1)
    unreduced = draw.randrange(1, last - 1)
    sent, reduced = _cuts(draw, len(names)), _cuts(draw, last)
    tag, first_rank, first_step, first_names, fault = {  # where the first wrong number is
        "weights not sent": ("sent", None, 0, [names[unsent]], [
            (f"in {_table(sent)}:  #@sent", f"in {_table(sent, unsent)}:  #@sent"),
        ]),
        "gradient not reduced": ("reduced", None, 0, [names[unreduced]], [
            (f"in {_table(reduced)}:  #@reduced", f"in {_table(reduced, unreduced)}:  #@reduced"),
        ]),
        "sum not divided": ("divide", None, 0, names[last:], [
            ("    tail /= dist.get_world_size()\n", ""),
            ("    return tail[0]", "    return tail[0] / dist.get_world_size()  #@divide"),
        ]),
        "clipped alone": ("clip", rank, step, [None], [
            (REDUCED, ""), (CLIP, f"{CLIP}  #@clip\n{REDUCED.rstrip()}"),
        ]),
        "step left out alone": ("leave", rank, step + 1, [None], [
            ("            if loss < SPIKE:\n                optimizer.step()",
             "            if own < SPIKE:  #@leave\n                optimizer.step()  #@leave"),
        ]),
    }[cause]
    body = WRONG.replace("<sent>", str(_table(sent))).replace("<reduced>", str(_table(reduced)))
    text, sound, lines = _put_together(
        draw, HEAD.format(name="wrong", number=number, about=WRONG_ABOUT,
                          imports="\nfrom labs.support.profiling.machine import unwatched"),
        constants | {"LARGE": LARGE, "SPIKE": SPIKE, "LAST": last}, body, fault,
    )
    row = draw.randrange(rank, ROWS, RANKS)
    troubles = {
        "clipped alone": Troubles(outliers={step: {row: OUTLIER}}),
        "step left out alone": Troubles(outliers={step: {row: HUGE}}),
    }.get(cause, Troubles())
    truth = {"rank": first_rank, "step": first_step, "name": first_names, "line": lines[tag],
             "cause": cause}
    return Program(text, sound, truth, constants["WIDTHS"], troubles, {})


def _cuts(draw: random.Random, end: int) -> list[int]:
    """0, one or two places between, and `end`."""
    return [0, *sorted(draw.sample(range(1, end), min(2, end - 1))), end]


def _table(cuts: list[int], missing: int | None = None) -> tuple:
    """((0, 3), (3, 8)) for the cuts 0, 3, 8; without the parameter `missing`."""
    around = set() if missing is None else {missing, missing + 1}
    return tuple(pair for pair in pairwise(sorted({*cuts, *around})) if pair[0] != missing)


FAULTY = {"slow": slow, "hanging": hanging, "wrong": wrong}


def truths(number: int) -> str:
    """For an instructor: what a learner should find."""
    return "\n".join(f"{name}: {make(number).truth}" for name, make in FAULTY.items())
