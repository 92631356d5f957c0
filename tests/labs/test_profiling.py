"""Lab 11: what its checks must accept and reject, and that what is planted can be found."""

import re

import pytest
import torch

from labs.support.profiling import check_programs, programs, reference, runs
from labs.support.profiling.machine import Machine
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.trial import Trial
from utils.measure.divergence import first_between, first_difference
from utils.measure.findings import report

LAB = Lab(
    "11_profiling",
    {
        **{name: ("check_diagnosis", name, "diagnosis.py") for name in programs.NAMES},
        **{f"{name}_program": ("check_programs", name, f"{name}.py") for name in programs.NAMES},
    },
    # two answers are judged at once; what loops does nothing else
    {"utils.course.trial.HANG": 8.0, "utils.course.trial.TOO_LONG": 12.0},
)

OTHERS = {
    "slow: another spelling, measured on a busy machine, three digits of the bytes": """
def slow():
    return {"rank": 3, "line": 60, "cause": "Health_checks", "ms": 69.9, "message_line": 26,
            "message_cause": "One for each parameter ", "message_calls": 9, "message_bytes": 4.55e3}
""",
    "slow: the other line, and the other edge": """
def slow():
    return {"rank": 3.0, "line": 60, "cause": "health checks", "ms": 107, "message_line": 25,
            "message_cause": "one for each parameter", "message_calls": 9, "message_bytes": 4_597}
""",
    "slow: more than was asked": """
def slow() -> dict:
    "A late rank."
    return {"note": ["who looks so often?"], "rank": 3, "line": 60, "cause": "health checks",
            "ms": 86.5, "message_line": 26, "message_cause": "one for each parameter",
            "message_calls": 9, "message_bytes": 4552}
""",
    "slow: the line that makes the message": """
NUMBER = 4711

def slow():
    return {"rank": 3, "line": 55, "cause": "data loading", "ms": 53, "message_line": 35,
            "message_cause": "more than the gradients", "message_calls": 1, "message_bytes": 10776}
""",
    "slow: the loop that makes it larger": """
NUMBER = 4711

def slow():
    return {"rank": 3, "line": 55, "cause": "data loading", "ms": 53, "message_line": 33,
            "message_cause": "more than the gradients", "message_calls": 1, "message_bytes": 10776}
""",
    "slow: one after the other, as keywords": """
def slow():
    return dict(message_bytes=4552, message_calls=9, message_cause="one for each parameter",
                message_line=26, ms=86, cause="health checks", line=60, rank=3)
""",
    "hanging: the line that is done": """
def hanging():
    return {"rank": 2, "line": 93, "waits": 96, "cause": "calls it alone"}
""",
    "hanging: whole numbers as floats": """
def hanging():
    return {"rank": 2.0, "line": 92.0, "waits": 96.0, "cause": "calls it alone"}
""",
    "hanging: as it is written": """
def hanging():
    return {"rank": 2, "line": 92, "waits": 96, "cause": " calls it  ALONE"}
""",
    "hanging: a text of two parts, a number of another base": """
def hanging():
    return ({"rank": 0b10, "line": +92, "waits": 0x60, "cause": "calls it "
             "alone"})
""",
    "wrong: the line that is left out": """
def wrong():
    return {"rank": 0, "step": 5, "name": None, "line": 80, "cause": "step left out alone"}
""",
    "wrong: in another order": """
def wrong():
    return {"cause": "step left out alone", "line": 79, "name": None, "step": 5, "rank": 0}
""",
    "wrong: as keywords": """
def wrong():
    return dict(cause="Step left-out alone", line=79, name=None, step=5, rank=0)
""",
    "wrong: more than was asked": """
def wrong():
    return {"rank": 0, "step": 5, "name": None, "line": 79, "cause": "step left out alone",
            "sure": True}
""",
    "slow_program: DDP, one pass over all rows, a log at the end": """
def train(machine, steps, after=lambda model: None):
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses, lines = [], []
    try:
        for step in range(steps):
            if step % OFTEN == 2 and machine.temperature(step) > 90:
                raise RuntimeError("too hot")
            x, y = machine.unpack(machine.read(step))
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            dist.all_reduce(loss)
            losses.append(loss.item() / dist.get_world_size())
            lines.append(f"step {step}: loss {losses[-1]:.6f}")
            if step % OFTEN == OFTEN - 1:
                machine.save(step, model.module)
            after(model)
    finally:
        machine.log(*lines)
    return losses
""",
    "slow_program: looks and checkpoints in a thread": """
def train(machine, steps, after=lambda model: None, solution=train):
    from concurrent.futures import ThreadPoolExecutor
    from copy import deepcopy

    with ThreadPoolExecutor(1) as pool:
        ask, save, saved = machine.temperature, machine.save, []
        machine.temperature = lambda step: pool.submit(ask, step).result()
        machine.save = lambda step, model: saved.append(pool.submit(save, step, deepcopy(model)))
        losses = solution(machine, steps, after)
        for one in saved:
            one.result()
    return losses
""",
    "slow_program: two messages, one of them later": """
def reduce(model, optimizer, loss):
    ranks, loss = dist.get_world_size(), loss / dist.get_world_size()
    handle = dist.all_reduce(loss, async_op=True)
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads]) / ranks
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))
    handle.wait()
    return loss
""",
    "slow_program: alone, no message": """
def reduce(model, optimizer, loss, solution=reduce):
    return solution(model, optimizer, loss) if dist.get_world_size() > 1 else loss
""",
    "hanging_program: everybody is asked before anything is done": """
def train(machine, steps, solution=train):
    ask, rank = machine.asked_to_stop, dist.get_rank()
    asked = torch.tensor([float(ask(step)) for step in range(steps)])
    dist.all_reduce(asked)
    machine.asked_to_stop = lambda step: bool(asked[step])
    return solution(machine, steps)
""",
    "hanging_program: one group for all": """
from pathlib import Path

source = Path(__file__).read_text().split("### END")[0]
source = source.replace("(dist.new_group() for _ in range(4))", "[dist.group.WORLD] * 4")
exec(source, globals())
""",
    "hanging_program: nobody sends the score, all have it": """
def score(machine, model, group):
    return machine.score(model).item()
""",
    "hanging_program: the largest by gathering": """
def largest(value, first, second):
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value, group=second)
    return max(found).item()
""",
    "wrong_program: the same seed, nothing to send": """
from pathlib import Path

source = Path(__file__).read_text().split("### END")[0]
exec(source.replace("SEED + dist.get_rank()", "SEED"), globals())


def send(model):
    pass
""",
    "wrong_program: one message for all": """
def reduce(model, loss):
    tensors = [loss, *[p.grad for p in model.parameters()]]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))
    return loss
""",
    "wrong_program: a message for each, divided before": """
def reduce(model, loss):
    loss = loss / dist.get_world_size()
    for tensor in [loss, *[p.grad for p in model.parameters()]]:
        tensor /= 1 if tensor is loss else dist.get_world_size()
        dist.all_reduce(tensor)
    return loss
""",
    "wrong_program: clipped by rank 0, without torch's 1e-6": """
def reduce(model, loss):
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([tensor.flatten() for tensor in [loss, *grads]])
    dist.reduce(flat, 0)
    flat /= dist.get_world_size()
    flat[1:] *= min(1.0, LARGE / flat[1:].norm())
    dist.broadcast(flat, 0)
    for grad, part in zip(grads, flat[1:].split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))
    return flat[0]
""",
    "wrong_program: clipped by hand": """
class Clip:
    @staticmethod
    def clip_grad_norm_(parameters, most):
        grads = [p.grad for p in parameters]
        norm = sum(grad.square().sum() for grad in grads).sqrt()
        for grad in grads:
            grad *= min(1.0, most / (norm + 1e-6))


from pathlib import Path

source = Path(__file__).read_text().split("### END")[0]
exec(source.replace("torch.nn.utils.clip", "Clip.clip"), globals())
""",
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 100
    each = dict.fromkeys(LAB.exercises, (12, 6, 4))


# ---- what is planted can be found with the lesson's tools


def numbers_for(cause_of, causes) -> list[int]:
    """The first number with which each of these causes is planted."""
    found = {}
    for number in range(1, 1000):
        found.setdefault(cause_of(number), number)
    return sorted(found[cause] for cause in causes)


@pytest.fixture
def handed_out(tmp_path):
    """A learner's folder: broken(number, name) is a program of hers."""

    def broken(number, name):
        (tmp_path / "diagnosis.py").write_text(f"NUMBER = {number}\n")
        programs.hand_out(tmp_path)
        return tmp_path / "broken" / f"{name}.py"

    return broken


def late(number):
    """Late enough for a busy machine."""
    found = programs.slow(number).truth["late"]
    return found["cause"] if found["ms"] > 80 else None


def messages(number):
    return programs.slow(number).truth["messages"]["cause"] if late(number) else None


SLOW = {*numbers_for(late, programs.LATE.values()), *numbers_for(messages, programs.MESSAGES)}


@pytest.mark.parametrize("number", sorted(SLOW))
def test_what_makes_it_slow_is_found(handed_out, number):
    path, truth = handed_out(number, "slow"), programs.slow(number).truth
    right, made = truth["late"], report(runs.traced(path))
    assert max(made.late, key=made.late.get) == right["rank"]
    ms, name = re.findall(r"([\d.]+)  (\w+) \(machine", runs.profiled(path, right["rank"]))[0]
    assert programs.LATE[name] == right["cause"]
    assert float(ms) / programs.STEPS > 0.98 * right["ms"]  # a sleep may last longer
    lines = path.read_text().splitlines()
    assert [n for n, line in enumerate(lines, 1) if f".{name}(" in line] == right["line"]
    found = made.collectives().values()
    assert sum(one["calls"] for one in found) == truth["messages"]["calls"]
    assert sum(one["bytes"] or 0 for one in found) == truth["messages"]["bytes"]


def hangs(number):
    return programs.hanging(number).truth["hanging"]["cause"]


@pytest.mark.parametrize("number", numbers_for(hangs, programs.HANGS))
def test_who_left_the_others_is_found(handed_out, number):
    said = runs.stands_still(handed_out(number, "hanging"))
    right = programs.hanging(number).truth["hanging"]
    blocks = re.split(r"\n(?=ranks? )", said)[1:]
    assert len(blocks) == 2
    alone, others = sorted(blocks, key=lambda block: not block.startswith(f"rank {right['rank']} "))
    assert alone.startswith(f"rank {right['rank']} ") and others.startswith("ranks ")
    assert [int(line) for line in re.findall(r"hanging.py:(\d+)", others)][-1] in right["waits"]


def wrongs(number):
    return programs.wrong(number).truth["wrong"]["cause"]


@pytest.mark.parametrize("number", numbers_for(wrongs, programs.WRONGS))
def test_the_first_wrong_number_is_found(handed_out, number):
    one, ranks = runs.watched(handed_out(number, "wrong"))
    right = programs.wrong(number).truth["wrong"]
    found = first_difference(one, ranks) if right["cause"] in WHOLE else first_between(ranks)
    assert found.entry.step == right["step"]
    if right["name"] != [None]:
        assert found.entry.name in right["name"]
    rank = found.rank
    if right["cause"] == "clipped alone":
        own = [[e.norm for e in some if (e.step, e.phase, e.name) == (found.entry.step,
                "backward", "")] for some in ranks]  # fmt: skip
        rank = own.index(max(own))
    assert right["rank"] in (None, rank)


WHOLE = ("sum not divided", "clipped alone")  # the replicas agree: only one rank knows better


def test_a_row_far_off_is_far_off_for_its_rank_alone():
    """On sound weights, in no step before; so only that rank decides otherwise than the others."""
    seen = 0
    for number in range(1, 60):
        program = programs.wrong(number)
        truth, settings = program.truth["wrong"], program.settings
        if truth["rank"] is None:
            continue
        ((planted, _),) = program.troubles.outliers.items()
        model, found = reference.network(settings), []
        machines = [
            Machine(rank, programs.RANKS, settings.widths, number, troubles=program.troubles)
            for rank in range(programs.RANKS)
        ]
        _, weights, _ = reference.wrong(
            settings, Machine(0, 1, settings.widths, number), planted + 1
        )
        for step in range(planted + 1):
            torch.nn.utils.vector_to_parameters(weights[step], model.parameters())
            for rank, machine in enumerate(machines):
                x, y, _ = machine.rows(step)
                loss = (model(x) - y).square().mean()
                grads = torch.autograd.grad(loss, list(model.parameters()))
                norm = torch.cat([grad.flatten() for grad in grads]).norm()
                clipped = truth["cause"] == "clipped alone"
                if norm > programs.LARGE if clipped else loss >= programs.SPIKE:
                    found.append((step, rank))
        assert found == [(planted, truth["rank"])], number
        seen += 1
    assert seen > 10


def test_a_number_gives_the_same_programs_and_most_others():
    for make in programs.FAULTY.values():
        assert make(7) == make(7) and len({make(n).text for n in range(1, 40)}) == 39
        assert all(max(map(len, make(n).text.splitlines())) <= 100 for n in range(1, 200))


def test_another_learners_answers_are_wrong():
    def answers(number):
        return repr([make(number).truth for make in programs.FAULTY.values()])

    assert len({answers(number) for number in range(1, 500)}) == 499


@pytest.mark.parametrize("name", ["hanging", "wrong"])
def test_a_sound_program_of_another_number_passes(tmp_path, name):
    (tmp_path / "diagnosis.py").write_text("NUMBER = 4321\n")
    path = tmp_path / f"{name}.py"
    path.write_text(programs.FAULTY[name](4321, sound=True).text)
    assert "one rank" in getattr(check_programs, name)(Trial(path, 1))


# ---- handing out


def test_handing_out_keeps_what_is_mended(tmp_path, capsys):
    programs.hand_out(tmp_path)
    assert "Nothing is handed out yet" in capsys.readouterr().out
    (tmp_path / "diagnosis.py").write_text("NUMBER = 17\n")
    stub = 'def train():\n    raise NotImplementedError("hand out")\n'
    (tmp_path / "slow.py").write_text(stub)
    (tmp_path / "wrong.py").write_text("# mine\n")
    programs.hand_out(tmp_path)
    assert (tmp_path / "slow.py").read_text() == programs.slow(17).text
    assert (tmp_path / "broken" / "wrong.py").read_text() == programs.wrong(17).text
    assert (tmp_path / "wrong.py").read_text() == "# mine\n"
    assert "stays as it is" in capsys.readouterr().out


def test_a_number_may_have_a_type(tmp_path):
    (tmp_path / "diagnosis.py").write_text("OTHER: int = 3\nNUMBER: int\nNUMBER: int = 17\n")
    assert programs.number_in(tmp_path) == 17


@pytest.mark.parametrize("line", ["NUMBER = 0", "NUMBER = 'me'", "NUMBER = 1 + 1", "number = 3"])
def test_a_number_that_is_none_gets_one_sentence(tmp_path, line):
    (tmp_path / "diagnosis.py").write_text(line + "\n")
    with pytest.raises(ValueError, match="write NUMBER = 17, or another whole number"):
        programs.number_in(tmp_path)
