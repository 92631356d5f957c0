"""Lab 13, exercise b: the answers that its check must accept and reject, and its pieces."""

import socket
from functools import partial

import psutil
import pytest
import torch

from labs.support.fault_tolerance import elastic_run
from labs.support.fault_tolerance.crew import Settings, alone, store_server
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from tests.patience import patience

LAB = Lab(
    "13_fault_tolerance",
    {"elastic": ("check_elastic", "elastic", "elastic.py")},
    {"utils.course.trial.HANG": 10.0},  # two answers are judged at once
)

OTHERS = {
    "elastic: torch's optimizer, gradients in .grad, one message for each": """
class Velocity(list):
    optimizer = None


def optimizer_of(crew, model, velocity):
    velocity.optimizer = velocity.optimizer or torch.optim.SGD(
        model.parameters(), lr=crew.lr, momentum=crew.momentum
    )
    for p, v in zip(model.parameters(), velocity):
        velocity.optimizer.state[p]["momentum_buffer"] = v
    return velocity.optimizer


def one_step(crew, model, velocity, step):
    optimizer = optimizer_of(crew, model, velocity)
    optimizer.zero_grad()
    rank, size = dist.get_rank(), dist.get_world_size()
    loss = crew.losses(model, step, range(rank, crew.batch, size)).sum() / crew.batch
    loss.backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    total = loss.detach().clone()
    works.append(dist.all_reduce(total, async_op=True))
    for work in works:
        work.wait()
    optimizer.step()
    return total.item()


solution = train


def train(crew, model, steps):
    return trained(crew, model, steps, Velocity(torch.zeros_like(p) for p in model.parameters()))


def trained(crew, model, steps, velocity):
    store, members = crew.store(), crew.members
    done = generation = 0
    while True:
        members = meet(crew, store, generation, members)
        if crew.rank not in members:
            return False
        try:
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(f"group {generation}", store),
                rank=members.index(crew.rank), world_size=len(members),
                timeout=datetime.timedelta(seconds=crew.limit),
            )
            done = take_furthest(model, velocity, done)
            for step in range(done, steps):
                loss = one_step(crew, model, velocity, step)
                done = step + 1
                crew.after(step, model, loss)
            dist.barrier()
            return True
        except RuntimeError:
            generation += 1
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
""",
    "elastic: gloo's own objects, contiguous rows, names in place of numbers": """
def train(crew, model, steps):
    store, members = crew.store(), list(crew.members)
    limit = datetime.timedelta(seconds=crew.limit)
    parameters = list(model.parameters())
    velocity = [torch.zeros_like(p) for p in parameters]
    done, name = 0, "first"
    while crew.rank in (members := meet(crew, store, name, members)):
        group = None
        try:
            place, size = members.index(crew.rank), len(members)
            at = dist.PrefixStore(f"group {name}", store)
            group = dist.ProcessGroupGloo(at, place, size, limit)
            count = torch.tensor([done])
            counts = [torch.zeros_like(count) for _ in members]
            group.allgather([counts], [count]).wait()
            furthest = max(int(c) for c in counts)
            if any(int(c) < furthest for c in counts):
                root = [int(c) for c in counts].index(furthest)
                state = torch.cat([t.detach().flatten() for t in (*parameters, *velocity)])
                group.broadcast(state, root).wait()
                torch._foreach_copy_(
                    [t.detach() for t in (*parameters, *velocity)],
                    [part.view_as(t) for t, part in zip(
                        (*parameters, *velocity),
                        state.split([t.numel() for t in (*parameters, *velocity)]))],
                )
                done = furthest
            while done < steps:
                mine = torch.arange(crew.batch).tensor_split(size)[place]
                loss = crew.losses(model, done, mine).sum() / crew.batch
                gradients = [*torch.autograd.grad(loss, parameters), loss.detach()]
                for gradient in gradients:
                    group.allreduce(gradient).wait()
                with torch.no_grad():
                    for p, v, gradient in zip(parameters, velocity, gradients):
                        v *= crew.momentum
                        v += gradient
                        p.sub_(v, alpha=crew.lr)
                done += 1
                crew.after(done - 1, model, gradients[-1])
            group.barrier().wait()
            return True
        except RuntimeError:
            name = f"after {name}"
        finally:
            del group
    return False
""",
    "elastic: the state goes through the store": """
def take_furthest(model, velocity, done):
    import io

    counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([done]))
    furthest = max(counts)
    store = dist.PrefixStore("state", dist.group.WORLD.get_group_store())
    if done < furthest:
        state = torch.load(io.BytesIO(store.get("furthest")))
        for tensor, new in zip((*model.parameters(), *velocity), state):
            tensor.data.copy_(new)
    elif counts.index(furthest) == dist.get_rank() and min(counts) < furthest:
        with io.BytesIO() as file:
            torch.save([t.detach() for t in (*model.parameters(), *velocity)], file)
            store.set("furthest", file.getvalue())
    return int(furthest)
""",
    "elastic: a step in two phases": """
def one_step(crew, model, velocity, step):
    rank, size, parameters = dist.get_rank(), dist.get_world_size(), list(model.parameters())
    first, end = (place * crew.batch // size for place in (rank, rank + 1))
    losses = crew.losses(model, step, range(first, end))
    gradients = torch.autograd.grad(losses.sum(), parameters)
    flat = torch.cat([*[g.flatten() for g in gradients], losses.detach().sum().view(1)])
    dist.all_reduce(flat)
    dist.barrier()
    flat /= crew.batch
    parts = flat[:-1].split([p.numel() for p in parameters])
    with torch.no_grad():
        for p, v, part in zip(parameters, velocity, parts):
            p -= crew.lr * v.mul_(crew.momentum).add_(part.view_as(p))
    return float(flat[-1])
""",
    "elastic: who is left computes the lost rows only": """
own = {}


def one_step(crew, model, velocity, step):
    rank, size, parameters = dist.get_rank(), dist.get_world_size(), list(model.parameters())
    if own.get("of") != (id(model), step):
        own.update(of=(id(model), step), rows=set(), flat=0.0)
    marks = torch.zeros(crew.batch, dtype=torch.uint8)
    marks[sorted(own["rows"])] = 1
    dist.all_reduce(marks)  # whose gradients are still there
    lost = [row for row in range(crew.batch) if not marks[row]]
    mine = lost[rank::size]
    loss = crew.losses(model, step, mine).sum() / crew.batch
    gradients = torch.autograd.grad(loss, parameters)
    own["flat"] = own["flat"] + torch.cat([loss.detach().view(1), *map(torch.flatten, gradients)])
    own["rows"] |= set(mine)
    flat = own["flat"].clone()
    dist.all_reduce(flat)
    parts = flat[1:].split([p.numel() for p in parameters])
    with torch.no_grad():
        for p, v, part in zip(parameters, velocity, parts):
            p -= crew.lr * v.mul_(crew.momentum).add_(part.view_as(p))
    return flat[0].item()
""",
    "elastic: the list is made by the smallest number, with compare_set of a text": """
def meet(crew, store, generation, before):
    key = f"{generation}: "
    store.set(key + str(crew.rank), "here")
    store.add(key + "count", 1)
    until = time.monotonic() + crew.patience
    while time.monotonic() < until and store.add(key + "count", 0) < len(before):
        if store.check([key + "list"]):
            break
        time.sleep(0.02)
    here = [rank for rank in before if store.check([key + str(rank)])]
    said = store.compare_set(key + "list", "", " ".join(map(str, here)))
    return [int(word) for word in said.split()]
""",
}


# Ranks that are killed, late or cut off: on a busy machine another case is the first that is wrong.
SYMPTOMS = (
    "an endless loop?",
    "did not complete within",
    "Whose state is the furthest",
    "weights and the velocity of the furthest",
    "Is g the gradient of the mean",
    "the same bits",
    "two crews",
    "makes a further step",
    "shares the rows",
    "to share",
    "is computed",
    "until they close the list",
    "failures.",
    "and train ends with it",
    "is made once, and the next one comes after it",
    "tell crew.after of step",
    "groups were made, and each has failed",
)


class TestLab(LabTests):
    lab, others, least, each, symptoms = LAB, OTHERS, 40, (40, 9, 6), SYMPTOMS


def test_a_disturbed_run_has_the_curve_of_an_undisturbed_one(monkeypatch):
    patient = partial(Settings, limit=patience(1), patience=patience(2))
    monkeypatch.setattr(elastic_run, "Settings", patient)
    file, steps = LAB.solution / "elastic.py", 8
    calm = elastic_run.run(file, size=3, steps=steps)
    wild = elastic_run.run(file, size=3, steps=steps, killed={0: 2, 1: 5})
    assert calm.ended == ["made all steps"] * 3 and calm.still == []
    assert wild.ended == ["killed in step 2", "killed in step 5", "made all steps"]
    assert len(wild.still) == 2 and all(seconds > 1.5 for seconds in wild.still)
    for run in (calm, wild):
        assert run.losses == pytest.approx(elastic_run.one_rank(steps), rel=1e-12)


def test_what_is_not_written_is_said(tmp_path, capsys):
    file = tmp_path / "elastic.py"
    file.write_text('def train(crew, model, steps):\n    raise NotImplementedError("meet")\n')
    assert elastic_run.run(file, size=2, steps=2) is None
    assert capsys.readouterr().out == "Come back when the check says [ok]. meet\n"


def test_one_rank_learns_as_torchs_optimizer_does():
    settings = Settings(size=1, steps=6, batch=5, seed=3)
    model = settings.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    weights, losses = alone(settings)
    for step in range(settings.steps):
        optimizer.zero_grad()
        loss = settings.losses(model, step, range(5)).mean()
        loss.backward()
        optimizer.step()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-12)
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert torch.allclose(found, weights[step], rtol=0, atol=1e-14)
    assert losses[-1] < losses[0]


def test_rows_are_the_same_whoever_asks():
    settings = Settings(size=3, steps=2, batch=7, seed=5)
    model = settings.network()
    whole = settings.losses(model, 1, range(7))
    assert torch.allclose(
        torch.cat([settings.losses(model, 1, r) for r in ([2, 0], [], [6])]), whole[[2, 0, 6]]
    )
    assert not torch.allclose(settings.losses(model, 0, range(7)), whole)


def test_the_stores_socket_is_one_whose_clients_nobody_looks_up():
    """torch asks the DNS who comes to an IPv6 socket from ::ffff:127.0.0.1, and ranks are late."""
    store = store_server()
    open_sockets = psutil.Process().net_connections("tcp")
    assert {c.family for c in open_sockets if c.laddr.port == store.port} == {socket.AF_INET}
