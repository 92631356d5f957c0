"""Given: the three broken programs of each learner's number, and what is wrong with them.

    programs.hand_out()                        # writes them into the learner's folder
    programs.slow(17).text                     # the program of learner 17
    programs.slow(17).truth                    # what is planted in it

A program is put together from parts. Each has a sound form and a broken one that looks like it;
which is broken, at which rank and step, and where the parts stand is drawn from the number.
(Whoever reads on knows how the riddles are made. The answers to yours are not here.)
"""

import ast
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
LATE = {
    "unpack": "data loading",
    "save": "checkpoints",
    "log": "logging",
    "temperature": "health checks",
}
MESSAGES = (
    "one for each parameter",
    "one for each micro-batch",
    "more than the gradients",
    "the loss of each micro-batch",
    "barriers",
)
HANGS = (
    "skips a collective",
    "decides alone",
    "leaves the loop",
    "another order",
    "calls it alone",
)
WRONGS = (
    "weights not sent",
    "gradient not reduced",
    "sum not divided",
    "clipped alone",
    "step left out alone",
)
NAMES = ("slow", "hanging", "wrong")


@dataclass(frozen=True)
class Program:
    """text: of the file; lines: {tag: its lines}; truth: what is wrong; settings: what was drawn.

    troubles: of the machine that it is broken on; ms: {rank: {service: ms}}.
    """

    text: str
    lines: dict[str, list[int]]
    truth: dict[str, Any]
    settings: "Settings"
    troubles: Troubles
    ms: dict[int, dict[str, float]]


@dataclass(frozen=True)
class Settings:
    """What each learner's network and training are."""

    widths: tuple[int, ...]
    seed: int
    lr: float
    micro_batches: int

    @property
    def sizes(self) -> list[int]:
        """Numbers in each parameter: weight, bias, weight, bias …"""
        return [size for a, b in pairwise(self.widths) for size in (a * b, b)]

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return [f"{2 * n}.{kind}" for n in range(len(self.widths) - 1) for kind in
                ("weight", "bias")]


# ---- 1. a learner's number, and her folder


def number_in(folder: str | Path) -> int:
    """The NUMBER in folder/diagnosis.py.

    Raises NotImplementedError with the task where it is not written yet, ValueError where it is no
    whole number from 1 to 999999.
    """
    path = Path(folder) / "diagnosis.py"
    text = path.read_text(encoding="utf-8")
    found = [
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value
        and [ast.unparse(t) for t in getattr(node, "targets", None) or [node.target]] == ["NUMBER"]
    ]
    value = found[-1].value if found and isinstance(found[-1], ast.Constant) else found
    if value is None:
        raise NotImplementedError(text.splitlines()[found[-1].lineno - 2].removeprefix("# "))
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 999_999:
        raise ValueError(
            "diagnosis.py: write NUMBER = 17, or another whole number from 1 to 999999, as a line "
            "of its own"
        )
    return value


def hand_out(folder: str | Path = ".") -> None:
    """Writes broken/slow.py, broken/hanging.py and broken/wrong.py for the number in diagnosis.py,
    and puts a copy of each in the place of a stub that the learner has not touched."""
    folder = Path(folder)
    try:
        number = number_in(folder)
    except (NotImplementedError, ValueError, OSError, SyntaxError) as error:
        print(f"Nothing is handed out yet: {error}.")
        return
    (folder / "broken").mkdir(exist_ok=True)
    print(f"You are learner {number}.")
    for name in NAMES:
        text = FAULTY[name](number).text
        _write(folder / "broken" / f"{name}.py", text)
        own = folder / f"{name}.py"
        if not_begun(own):
            _write(own, text)
            print(f"broken/{name}.py is handed out, and {name}.py is your copy, to be mended.")
        else:
            print(f"broken/{name}.py is handed out; {name}.py is yours and stays as it is.")


def not_begun(path: Path) -> bool:
    """Whether there is no file, or a stub."""
    stub = re.compile(r"^ +raise NotImplementedError", re.MULTILINE)
    return not path.exists() or bool(stub.search(path.read_text(encoding="utf-8")))


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


# ---- 2. parts that all programs share

IMPORTS = """\
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn"""
NETWORK = '''
def network():
    """{about}"""
    torch.manual_seed(SEED{own_seed})
    layers = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
'''


def _settings(draw: random.Random) -> Settings:
    widths = (
        draw.randrange(4, 8), draw.randrange(10, 17), draw.randrange(17, 23),
        draw.randrange(9, 16), draw.randrange(2, 4),
    )
    return Settings(
        widths, draw.randrange(10_000), draw.randrange(5, 15) / 100, draw.choice((2, 3))
    )


def _put_together(
    draw: random.Random, about: str, settings: Settings, functions: list[str], train: str, **more
) -> tuple[str, dict[str, list[int]]]:
    """The text of a program, without its tags, and the lines of each tag."""
    head = f'"""{about}"""\n\n{IMPORTS}{more.pop("imports")}\n'
    constants = [f"WIDTHS = {settings.widths}", f"LR = {settings.lr}", f"SEED = {settings.seed}",
                 *more.pop("constants")]
    draw.shuffle(constants)
    draw.shuffle(functions)
    text = head + "\n" + "\n".join(constants) + "\n"
    for function in [*functions, train]:
        text += "\n\n" + function.strip("\n") + "\n"
    lines, plain = {}, []
    for number, line in enumerate(text.splitlines(), start=1):
        line, *tags = re.split(r"\s+#@", line)
        for tag in tags:
            lines.setdefault(tag, []).append(number)
        plain.append(line)
    return "\n".join(plain) + "\n", lines


def _indented(text: str, spaces: int) -> str:
    return "\n".join(" " * spaces + line if line else line for line in text.strip("\n").split("\n"))


# ---- 3. slow

SLOW = '''
def train(machine, steps, after=lambda model: None):
    """The loss of each step. `after(model)` is called at the end of each, on every rank."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    for step, (x, y) in enumerate(DataLoader(Rows(machine, steps), batch_size=None)):
{loop}
        after(model)
    return losses
'''
ROWS_CLASS = '''
class Rows(Dataset):
    """This rank's rows, an item for each step."""

    def __init__(self, machine, steps):
        self.machine, self.steps = machine, steps

    def __len__(self):
        return self.steps

    def __getitem__(self, step):
        packed = self.machine.read(step)
        return self.machine.unpack(packed)  #@unpack
'''
LEARN = {
    "": """
loss = torch.zeros((), dtype=torch.float64)
for rows, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
    part = (model(rows) - targets).square().sum() / y.numel()
    part.backward()
    loss += part.detach()
loss = reduce(model, optimizer, loss)
optimizer.step()
optimizer.zero_grad()
losses.append(loss.item())
""",
    "one for each micro-batch": """
loss = torch.zeros((), dtype=torch.float64)
total = [torch.zeros_like(p) for p in model.parameters()]
for rows, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
    part = (model(rows) - targets).square().sum() / y.numel()
    part.backward()
    loss += reduce(model, optimizer, part.detach())  #@messages
    for so_far, p in zip(total, model.parameters()):
        so_far += p.grad
        p.grad = None
for so_far, p in zip(total, model.parameters()):
    p.grad = so_far
optimizer.step()
optimizer.zero_grad()
losses.append(loss.item())
""",
    "the loss of each micro-batch": """
loss = torch.zeros((), dtype=torch.float64)
for rows, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
    part = (model(rows) - targets).square().sum() / y.numel()
    part.backward()
    part = part.detach()
    dist.all_reduce(part)  #@messages
    loss += part / dist.get_world_size()
reduce(model, optimizer, loss)
optimizer.step()
optimizer.zero_grad()
losses.append(loss.item())
""",
    "barriers": """
loss = torch.zeros((), dtype=torch.float64)
for rows, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
    part = (model(rows) - targets).square().sum() / y.numel()
    part.backward()
    loss += part.detach()
    dist.barrier()  #@messages
loss = reduce(model, optimizer, loss)
optimizer.step()
optimizer.zero_grad()
losses.append(loss.item())
""",
}
REDUCE = {
    "": '''
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
''',
    "one for each parameter": '''
def reduce(model, optimizer, loss):
    """The loss, a mean over the ranks; the gradients become means in their place."""
    tensors = [p.grad for p in model.parameters()]
    loss = loss.clone()
    for tensor in [loss, *tensors]:  #@messages
        dist.all_reduce(tensor)  #@messages
        tensor /= dist.get_world_size()
    return loss
''',
    "more than the gradients": '''
def reduce(model, optimizer, loss):
    """The loss, a mean over the ranks; the gradients become means in their place."""
    tensors = [p.grad for p in model.parameters()]
    for p in model.parameters():  #@messages
        tensors += [v for v in optimizer.state[p].values() if v is not None]  #@messages
    flat = torch.cat([loss.view(1), *[tensor.flatten() for tensor in tensors]])  #@messages
    dist.all_reduce(flat)  #@messages
    flat /= dist.get_world_size()
    sizes = [1, *[tensor.numel() for tensor in tensors]]
    for tensor, part in zip(tensors, flat.split(sizes)[1:]):
        tensor.copy_(part.view_as(tensor))
    return flat[0]
''',
}
ASKED = {  # before and after the step's own work
    "temperature": "if machine.temperature(step) > 90:  #@temperature\n"
    '    raise RuntimeError(f"rank {dist.get_rank()} is too hot")',
    "log": 'machine.log(f"step {step}: loss {losses[-1]:.6f}")  #@log',
    "save": "machine.save(step, model)  #@save",
}


def slow(number: int, sound: bool = False) -> Program:
    """The slow program of a learner. sound: with nothing wrong in its messages."""
    draw = random.Random(f"slow {number}")
    settings = _settings(draw)
    service, rank = draw.choice(SERVICES), draw.randrange(RANKS)
    ms = round(math.exp(draw.uniform(math.log(25), math.log(140))))
    cause = draw.choice(MESSAGES)
    there = "" if sound else cause
    after = ["log", "save"]
    draw.shuffle(after)
    before = draw.random() < 0.5
    loop = [LEARN.get(there, LEARN[""]), *[ASKED[name] for name in after]]
    loop.insert(0 if before else draw.randrange(1, 4), ASKED["temperature"])
    reduce = REDUCE.get(there, REDUCE[""])
    if there == "one for each micro-batch":  # the call and the message, both are the place
        for line in ("for tensor in tensors]])", "all_reduce(flat)"):
            reduce = reduce.replace(line, f"{line}  #@messages")
    text, lines = _put_together(
        draw,
        f"The slow program of learner {number}: ranks train one network, and a step takes too "
        "long.\n\ntrain(machine, steps) runs on every rank. The loss is the mean over the rows of "
        "all ranks, and all\nend with the same weights. What the machine's services need is said in"
        "\nlabs/support/profiling/machine.py.\n",
        settings,
        [ROWS_CLASS, NETWORK.format(about="The same on every rank.", own_seed=""), reduce],
        SLOW.format(loop="\n".join(_indented(part, 8) for part in loop)),
        imports="\nfrom torch.utils.data import DataLoader, Dataset",
        constants=[f"MICRO_BATCHES = {settings.micro_batches}"],
    )
    gradients, micro = 8 * sum(settings.sizes), settings.micro_batches
    sends = {  # calls and bytes a step
        "one for each parameter": (1 + len(settings.sizes), 8 + gradients),
        "one for each micro-batch": (micro, micro * (8 + gradients)),
        "more than the gradients": (1, 8 + 2 * gradients),
        "the loss of each micro-batch": (1 + micro, 8 * micro + 8 + gradients),
        "barriers": (1 + micro, 8 + gradients),
    }
    truth = {
        "late": {"rank": rank, "line": lines[service], "cause": LATE[service], "ms": ms},
        "messages": {
            "line": lines.get("messages"),
            "cause": cause,
            "calls": sends[cause][0],
            "bytes": sends[cause][1],
        },
    }
    times = {r: {service: float(ms)} if r == rank else {} for r in range(RANKS)}
    return Program(text, lines, truth, settings, Troubles(), times)


# ---- 4. hanging

HANGING = '''
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
{skip}
        errors = (model(x) - y).square().mean(dim=1) * counts
        (errors.sum() / all_numbers).backward()
{norm}
        loss = reduce(model, errors.detach().sum() / all_numbers, second)
        row = {{"step": step, "loss": loss.item()}}
{large}
        optimizer.step()
        optimizer.zero_grad()
{middle}
        done.append(row)
{stop}
    return done
'''
HANG_PARTS = {  # (sound, broken)
    "skips a collective": (
        "if not all_numbers:\n    continue",
        "if not number:  #@skip\n    continue  #@skip",
    ),
    "decides alone": (
        """
norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
if norm > LARGE:
    row["worst"] = worst(errors, third)
""",
        """
if norm > LARGE:  #@decide
    row["worst"] = worst(errors, third)  #@decide
""",
    ),
    "leaves the loop": (
        """
stop = torch.tensor([float(machine.asked_to_stop(step))])
dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=second)  #@stopping
if stop:
    break
""",
        "if machine.asked_to_stop(step):  #@stop\n    break  #@stop",
    ),
    "another order": (
        """
for name, value in sorted(machine.metrics(step, errors.detach()).items()):
    row[name] = (whole_error if name == "error" else largest)(value, first, second)
""",
        """
for name, value in machine.metrics(step, errors.detach()).items():  #@order
    row[name] = (whole_error if name == "error" else largest)(value, first, second)  #@order
""",
    ),
    "calls it alone": (
        """
if step % OFTEN == OFTEN - 1:
    row["score"] = score(machine, model, fourth)
""",
        """
if step % OFTEN == OFTEN - 1:
    if rank == machine.leader:  #@alone
        row["score"] = score(machine, model, fourth)  #@alone
""",
    ),
}
REDUCE_IN_GROUP = '''
def reduce(model, loss, group):
    """The loss of all ranks; the gradients become sums in their place."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([loss.view(1), *[grad.flatten() for grad in grads]])
    dist.all_reduce(flat, group=group)  #@reduce
    for grad, part in zip(grads, flat[1:].split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))
    return flat[0]
'''
WORST = '''
def worst(errors, group):
    """The largest error of a row, of all ranks."""
    value = errors.detach().max().view(1)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)  #@worst
    return value.item()
'''
SCORE = '''
def score(machine, model, group):
    """The mean of what the ranks find on rows that nobody learns."""
    value = machine.score(model)
    dist.all_reduce(value, group=group)  #@score
    return value.item() / dist.get_world_size()
'''
WHOLE_ERROR = '''
def whole_error(value, first, second):
    """The sum over the ranks."""
    dist.all_reduce(value, group=first)  #@error
    return value.item()
'''
LARGEST = '''
def largest(value, first, second):
    """The largest of all ranks."""
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=second)  #@largest
    return value.item()
'''
LARGE = 4.0  # a gradient's norm, far above the usual one
OUTLIER = 300.0  # a target far above the usual ones: its gradient is large


def hanging(number: int, sound: bool = False) -> Program:
    """The hanging program of a learner. sound: with nothing wrong in it."""
    draw = random.Random(f"hanging {number}")
    settings = _settings(draw)
    cause, rank, step = draw.choice(HANGS), draw.randrange(RANKS), draw.randrange(2, 6)
    often = draw.randrange(2, 5)

    def part(name):
        return HANG_PARTS[name][name == cause and not sound]

    alone = cause == "decides alone" and not sound
    norm = "norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()"
    middle = [part("another order"), part("calls it alone")]
    functions = [
        NETWORK.format(about="The same on every rank.", own_seed=""),
        REDUCE_IN_GROUP, WORST, SCORE, WHOLE_ERROR, LARGEST,
    ]
    train = HANGING.format(
        skip=_indented(part("skips a collective"), 8),
        norm=_indented(norm, 8) if alone else "#-",
        large=_indented(part("decides alone"), 8),
        middle="\n".join(_indented(one, 8) for one in middle),
        stop=_indented(part("leaves the loop"), 8),
    ).replace("#-\n", "")
    text, lines = _put_together(
        draw,
        f"The hanging program of learner {number}: ranks train one network, until they stand "
        "still.\n\ntrain(machine, steps) runs on every rank. The loss is the mean over the rows of "
        "all ranks that\ncount; a step in which no row of any rank counts is left out; when one "
        "rank is asked to stop, all\nstop after that step. Every rank returns the same.\n",
        settings, functions, train,
        imports="",
        constants=[f"LARGE = {LARGE}", f"OFTEN = {often}"],
    )
    troubles = {
        "skips a collective": Troubles(silent={step: tuple(range(rank, ROWS, RANKS))}),
        "decides alone": Troubles(outliers={step: {draw.randrange(rank, ROWS, RANKS): OUTLIER}}),
        "leaves the loop": Troubles(stops={step: (rank,)}),
        "another order": Troubles(turned={step: rank}),
        "calls it alone": Troubles(leader=rank),
    }[cause]
    tag, waits = {
        "skips a collective": ("skip", "reduce"),
        "decides alone": ("decide", "error"),
        "leaves the loop": ("stop", "numbers"),
        "another order": ("order", "error"),
        "calls it alone": ("alone", "stopping"),
    }[cause]
    truth = {
        "hanging": {
            "rank": rank,
            "line": lines.get(tag),
            "waits": lines.get(waits),
            "cause": cause,
        }
    }
    return Program(text, lines, truth, settings, troubles, {})


# ---- 5. wrong

WRONG = '''
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
{clip}
            watch.step()
{leave}
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses
'''
CLIPS = {  # (sound, broken)
    False: """
loss = reduce(model, own)
torch.nn.utils.clip_grad_norm_(model.parameters(), LARGE)
""",
    True: """
torch.nn.utils.clip_grad_norm_(model.parameters(), LARGE)  #@clip
loss = reduce(model, own)
""",
}
LEAVES = {
    False: """
if loss < SPIKE:
    optimizer.step()
""",
    True: """
if own < SPIKE:  #@leave
    optimizer.step()  #@leave
""",
}
SEND = '''
def send(model):
    """All ranks begin with the weights of rank 0."""
    parameters = list(model.parameters())
    for first, end in {table}:{tag}
        for p in parameters[first:end]:{tag}
            dist.broadcast(p.data, 0){tag}
'''
REDUCE_BUCKETS = '''
def reduce(model, loss):
    """The loss, a mean over the ranks; the gradients become means in their place."""
    parameters = list(model.parameters())
    for first, end in {table}:{tag}
        mean([p.grad for p in parameters[first:end]]){tag}
    tail = torch.cat([loss.view(1), *[p.grad.flatten() for p in parameters[LAST:]]]){divided}
    dist.all_reduce(tail){divided}
{divide}
    sizes = [p.numel() for p in parameters[LAST:]]{divided}
    for p, part in zip(parameters[LAST:], tail[1:].split(sizes)):{divided}
        p.grad.copy_(part.view_as(p)){divided}
    return tail[0]{over}
'''
MEAN = '''
def mean(tensors):
    """These tensors become means over the ranks, in one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))
'''
SPIKE = 1e6  # a loss that is no loss
HUGE = 1e5  # a target that makes one


def wrong(number: int, sound: bool = False) -> Program:
    """The wrong program of a learner. sound: with nothing wrong in it."""
    draw = random.Random(f"wrong {number}")
    settings = _settings(draw)
    cause, rank, step = draw.choice(WRONGS), draw.randrange(RANKS), draw.randrange(2, 6)
    names = settings.names
    last = len(names) - draw.randrange(1, 4)  # from here on: the tail, in a message of its own
    unsent = draw.randrange(1, len(names) - 1)
    unreduced = draw.randrange(1, last - 1)
    cuts = [_cuts(draw, len(names)), _cuts(draw, last)]
    broken = "" if sound else cause
    sent = _table(cuts[0], unsent if broken == "weights not sent" else None)
    reduced = _table(cuts[1], unreduced if broken == "gradient not reduced" else None)
    undivided = broken == "sum not divided"
    functions = [
        NETWORK.format(
            about="Every rank begins with weights of its own.", own_seed=" + dist.get_rank()"
        ),
        SEND.format(table=sent, tag="  #@sent"),
        REDUCE_BUCKETS.format(
            table=reduced,
            tag="  #@reduced",
            divided="  #@divide" if undivided else "",
            divide="#-" if undivided else "    tail /= dist.get_world_size()",
            over=" / dist.get_world_size()  #@divide" if undivided else "",
        ).replace("#-\n", ""),
        MEAN,
    ]
    train = WRONG.format(
        clip=_indented(CLIPS[broken == "clipped alone"], 12),
        leave=_indented(LEAVES[broken == "step left out alone"], 12),
    )
    text, lines = _put_together(
        draw,
        f"The wrong program of learner {number}: on several ranks it learns something else than on "
        "one.\n\ntrain(machine, steps) runs on every rank. The loss is the mean over the rows of "
        "all ranks. The\ngradient of all rows is clipped to the norm LARGE; a step whose loss is "
        "SPIKE or more is left out.\nAll ranks end with the same weights.\n",
        settings, functions, train,
        imports="\n\nfrom labs.support.profiling.machine import unwatched",
        constants=[f"LARGE = {LARGE}", f"SPIKE = {SPIKE}", f"LAST = {last}"],
    )
    row = draw.randrange(rank, ROWS, RANKS)
    troubles = {
        "clipped alone": Troubles(outliers={step: {row: OUTLIER}}),
        "step left out alone": Troubles(outliers={step: {row: HUGE}}),
    }.get(cause, Troubles())
    truth = {
        "weights not sent": (None, 0, [names[unsent]], "sent"),
        "gradient not reduced": (None, 0, [names[unreduced]], "reduced"),
        "sum not divided": (None, 0, names[last:], "divide"),
        "clipped alone": (rank, step, [None], "clip"),
        "step left out alone": (rank, step + 1, [None], "leave"),
    }[cause]
    about = dict(zip(("rank", "step", "name"), truth))
    truth = {"wrong": about | {"line": lines.get(truth[-1]), "cause": cause}}
    return Program(text, lines, truth, settings, troubles, {})


def _cuts(draw: random.Random, end: int) -> list[int]:
    """0, one or two places between, and `end`."""
    return [0, *sorted(draw.sample(range(1, end), min(2, end - 1))), end]


def _table(cuts: list[int], missing: int | None) -> tuple:
    """((0, 3), (3, 8)) for the cuts 0, 3, 8; without the parameter `missing`."""
    found = []
    for first, end in pairwise(cuts):
        if missing is None or not first <= missing < end:
            found.append((first, end))
        else:
            found += [pair for pair in ((first, missing), (missing + 1, end)) if pair[0] < pair[1]]
    return tuple(found)


FAULTY = {"slow": slow, "hanging": hanging, "wrong": wrong}


def truths(number: int) -> str:
    """For an instructor: what a learner should find."""
    found = {key: value for make in FAULTY.values() for key, value in make(number).truth.items()}
    return "\n".join(f"{key}: {value}" for key, value in found.items())
