"""Given: the contracts of lab 01's exercises, and the judges behind its check cells."""

import itertools
import math
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from labs.support.data_parallel.mpirun import mpirun
from labs.support.data_parallel.timeline import timeline
from utils.course.assertions import Wrong, a_number, alike, close, communication, told
from utils.course.contract import Call, Case, Contract, Seen, observed, wider
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Trial, attempted, fractions

# ---- a: over MPI


def data_parallel(trial: Trial) -> str:
    """Judge the three functions and the training in the file; mpi_rank.py observes them."""
    program, file = str(Path(__file__).with_name("mpi_rank.py")), str(trial.path)
    with tempfile.TemporaryDirectory() as folder:
        done = mpirun(6, program, file, folder, str(trial.new_seed()), folder=trial.path.parent)
        print(done.stdout[:2000], end="")
        said = {
            kind: [path.read_text() for path in sorted(Path(folder).glob(f"*.{kind}"))]
            for kind in ("task", "wrong", "case", "stack")
        }
    if said["task"]:
        raise NotImplementedError(said["task"][0])
    if said["wrong"]:
        raise Wrong(said["wrong"][0])
    for case, stack in zip(said["case"], said["stack"]):
        if stack:
            place = re.search(rf'File "{re.escape(file)}", (line \d+) in (\w+)', stack)
            where = f"{case}: one rank is in {trial.path.name} {place[1]}" if place else case
            why = "it never ends: an endless loop?"
            if "in collective" in stack:
                why = "the ranks wait for each other. Does every rank call the same collectives?"
            raise Wrong(f"{where}\n{why}")
    if done.returncode:
        raise Wrong(f"mpirun ended with code {done.returncode}:\n{done.stderr.strip()[-600:]}")
    return (
        "the learning curve of 1 to 6 ranks matches that of one rank, for batches of\n"
        "many sizes; batches of many sizes are split among up to 64 ranks, each row used once;\n"
        "ranks have different numbers of rows, or none; one broadcast, then one all-reduce per\n"
        "step on each rank."
    )


# ---- b, d, e: sums, from messages


BLOCKED = {  # hints, by the call in which all ranks wait
    "send": "dist.send returns only when the other rank has begun to receive: if all ranks send\n"
    "first, none ever receives. Let one of two neighbours receive first.",
    "": "Which rank sends what the waiting rank is to receive, and which receives what it sends? "
    "Does every\nrank take part, and in the same order?",
}


def only_messages(where: str, calls: list[Call]) -> None:
    """Only sends and receives are used, with elements no wider than the tensor's."""
    for rank, call in enumerate(calls):
        if other := {event.op for event in call.events} - {"send", "recv"}:
            raise Wrong(
                f"{where}: rank {rank} calls {', '.join(sorted(other))}; build it yourself from "
                "sends and receives."
            )
        if wide := wider(call):
            raise Wrong(f"{where}, rank {rank}:{wide}")


def ring_messages(where: str, case: Case, calls: list[Call]) -> None:
    """Each rank sends 2(N-1) messages of at most ⌈length/N⌉ elements, all to one neighbour."""
    only_messages(where, calls)
    n, (length, itemsize) = len(calls), (calls[0].result.numel(), calls[0].result.itemsize)
    right, part = 2 * (n - 1), math.ceil(length / n) * itemsize
    least = right * (length >= n)  # else some chunks are empty and need not be sent
    for rank, call in enumerate(calls):
        peers = {event.peer for event in call.sends}
        biggest = max((event.payload for event in call.sends), default=0)
        if biggest > part or len(peers) > 1 or not least <= len(call.sends) <= right:
            raise Wrong(
                f"{where}: rank {rank} sends {len(call.sends)} messages of up to {biggest} bytes "
                f"to ranks {sorted(peers)}.\nA ring sends 2(N-1) = {right} messages to one "
                f"neighbour, of at most {part} bytes: one chunk of N."
                + "\nThat is the whole tensor." * (biggest == length * itemsize)
            )


def asynchronous_messages(where: str, case: Case, calls: list[Call]) -> None:
    """The messages of a ring, where each rank receives while it sends."""
    ring_messages(where, case, calls)
    taken, steps = timeline([call.notes for call in calls]), 2 * (len(calls) - 1)
    if taken > steps:
        raise Wrong(
            f"{where}: the ring takes as long as {taken} messages in sequence; if every rank sends "
            f"and\nreceives at the same time, it takes 2(N-1) = {steps}. What has a rank started "
            "when it waits?"
        )


def tree_messages(where: str, case: Case, calls: list[Call]) -> None:
    """No message is larger than the tensor, and at most 2·⌈log2 N⌉ are in sequence."""
    only_messages(where, calls)
    steps = 2 * math.ceil(math.log2(len(calls)))
    if (path := timeline([call.notes for call in calls], at_once=False)) > steps:
        raise Wrong(
            f"{where}: {path} messages are sent in sequence; a tree needs at most "
            f"2·⌈log2 {len(calls)}⌉ = {steps}.\nA rank sends or receives one message at a time: "
            "let more pairs talk at once."
        )


def others_have_it(seen: Seen) -> list[int]:
    """Return the ranks that have the right sum."""
    return [rank for rank, call in enumerate(seen.calls) if alike(call.result, seen.right, 64)]


SYMPTOMS = [
    (others_have_it, lambda seen: f"Ranks {others_have_it(seen)} have the sum: which rank sends it "
     f"to rank {seen.rank}?"),
    (lambda seen: seen.result.equal(seen.own[0]),
     "The tensor has not changed: modify it in place, not a copy."),
    (lambda seen: (seen.result == seen.own[0]).any(),
     "Some places still hold this rank's own values: in which chunk are they?"),
    (lambda seen: True,
     "Which chunk does each rank send in each exchange? Print the chunk's index and the rank."),
]


def own_tensor(case: Case, rank: int, n: int, call: int) -> tuple[torch.Tensor]:
    return (case.numbers(rank, n, call),)


SUMS = (
    "right sums on 1, 2, 3 and 6 ranks for many shapes, small and large, in float32 and\n"
    "float64, on a slow network too; "
)
RING = Contract(
    "ring_all_reduce",
    inputs=own_tensor,
    right=lambda case, given, rank: sum(own.double() for (own,) in given),
    sizes=(2, 3, 1, 6), in_place=0, result="the sum", same_bits=True,
    messages=ring_messages, symptoms=SYMPTOMS, hang=BLOCKED,
    says=f"{SUMS}the same bits on all ranks; every rank sends 2(N-1)\n"
    "messages of at most ⌈length/N⌉ elements, all to one neighbour; no deadlock, although\n"
    "every send blocks.",
)
TREE = replace(
    RING, function="tree_all_reduce", same_bits=False, messages=tree_messages,
    says=f"{SUMS}no message is larger than the tensor, and at most\n"
    "2·⌈log2 N⌉ are in sequence.",
)
ASYNCHRONOUS_RING = replace(
    RING, function="asynchronous_ring_all_reduce", messages=asynchronous_messages,
    hang="Which rank waits for a message that no rank has started to send?",
    says=f"{SUMS}the same bits on all ranks; every rank sends 2(N-1)\n"
    "messages of at most ⌈length/N⌉ elements, and receives at the same time: the ring takes as\n"
    "long as 2(N-1) messages in sequence.",
)
ring, tree, asynchronous_ring = RING.judge, TREE.judge, ASYNCHRONOUS_RING.judge


def show_messages(file: str, function: str, size: int, length: int) -> None:
    """Print the messages that each rank sends for a tensor of `length` 8-byte elements."""
    job, case = (function, own_tensor, 0), Case((length,), torch.float64, seed=1)
    results = attempted(file, size, observed, job, case)
    if results is None:
        print(f"There are no messages to show yet: {file} does not run.")
    for rank, (call,) in enumerate(results or ()):
        listed = ", ".join(f"{event.payload:,} → {event.peer}" for event in call.sends) or "none"
        print(f"rank {rank} sends (bytes → rank): {listed}")


# ---- c: buckets

STEPS = 3
SMALL = 64  # bytes that may stay after a step: a value or two, no gradients


def bucketed(trial: Trial) -> str:
    """Judge `make_buckets` and `BucketedAllReduce` in the file."""
    trial.alone("make_buckets", makes_buckets, trial.new_seed())
    draw = trial.draw
    for group in trial.groups():
        for late in (False, True) if group.size in (2, 3) else (False,):
            widths = [draw.randrange(2, 14) for _ in range(draw.randrange(4, 10))]
            dtype = draw.choice([torch.float32, torch.float64])
            each = group.size == 2 and not late  # a bucket per parameter
            limit = 1 if each else draw.choice([draw.randrange(60, 900), 10**6])
            rows = [draw.randrange(1, 9) for _ in range(STEPS)]
            case = group.case(f"widths {widths} in {dtype}, bucket_bytes={limit}")
            case += ", on a slow network" * late
            with tempfile.TemporaryDirectory() as folder:
                job = widths, dtype, limit, rows, trial.new_seed(), Path(folder)
                group.run(case, steps, case, *job, late=late)
    return (
        f"gradients are the mean over 1 to 6 ranks, {STEPS} steps in a row, in float32 and\n"
        "float64, on a slow network too; one all-reduce per bucket, each gradient's bytes sent\n"
        "once; buckets leave before the backward pass ends, which never waits for another rank;\n"
        "nothing is kept."
    )


def right_buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """The indices of the parameters in each bucket, for parameters of these sizes in bytes."""
    buckets, space = [], 0
    for number, size in reversed([*enumerate(sizes)]):
        if size > space:
            buckets.append([])
            space = limit
        buckets[-1].append(number)
        space -= size
    return buckets


def makes_buckets(answer, seed: int) -> None:
    """In one process: the answer's buckets are those of the exercise, for any parameters."""

    def holds(drawn: tuple[list, int, int]) -> None:
        kinds, last, more = drawn
        parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in kinds]
        sizes = [p.nbytes for p in parameters]
        limit = max(1, sum(sizes[::-1][:last]) + more)  # fills the first bucket, or nearly
        number_of, right = {p: i for i, p in enumerate(parameters)}, right_buckets(sizes, limit)
        made = answer.make_buckets(parameters.copy(), limit)
        mine = [[number_of[p] for p in bucket] for bucket in made]
        order = [number for bucket in mine for number in bucket]
        hint = "How many bytes does each have, and when is a bucket full?"
        if order != sorted(order, reverse=True):
            hint = "The backward pass computes the last layer's gradients first."
        if len(order) < len(parameters):
            hint = "Some are left out: the last bucket counts too, even if it is not full."
        if mine != right:
            raise Wrong(
                f"with parameters of {sizes} bytes and bucket_bytes={limit}: make_buckets makes "
                f"the buckets {mine}, and {right} is right.\n{hint}"
            )

    dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
    kinds = st.lists(st.tuples(st.integers(1, 40), dtypes), min_size=1, max_size=9)
    for_all(seed, st.tuples(kinds, st.integers(0, 4), st.integers(0, 3)), holds)


def network(widths: list[int], dtype: torch.dtype) -> nn.Sequential:
    """A chain of linear layers, the same on every rank."""
    torch.manual_seed(0)
    layers = [(nn.Linear(i, o, dtype=dtype), nn.Tanh()) for i, o in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain(*layers))


def steps(
    answer, case: str, widths: list[int], dtype: torch.dtype, limit: int, rows: list[int],
    seed: int, folder: Path,
) -> None:
    """On a rank: take three steps, and compare with a float64 network that sees all ranks' rows.
    No other rank begins its backward pass until rank 0 has finished its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, twin = network(widths, dtype), network(widths, dtype).double()
    sizes = [parameter.nbytes for parameter in model.parameters()]
    buckets = [sum(sizes[i] for i in bucket) for bucket in right_buckets(sizes, limit)]
    look, on_way = Look(), []  # buckets sent when the last gradient was ready, per step
    model[0].weight.register_post_accumulate_grad_hook(lambda _: on_way.append(len(look.events)))
    with look:
        reducer = answer.BucketedAllReduce(model, limit)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = fractions(seed + 10 * step + rank, rows[step] + rank, widths[0])
        return model(x.to(next(model.parameters()).dtype)).square().mean()

    for step in range(STEPS):
        where, begun = f"{case}, rank {rank}, step {step + 1}", len(look.events)
        losses = [loss(twin, step, other) for other in range(size)]
        parts = [torch.autograd.grad(one, [*twin.parameters()]) for one in losses]
        with look:
            value = loss(model, step, rank)
            if rank:
                await_file(folder / f"{step}", where)
            value.backward()
            (folder / f"{step}").touch()
            reducer.wait()
        for (name, parameter), *each in zip(model.named_parameters(), *parts):
            right = sum(each) / size
            hint = told(SCALES, (parameter.grad, right, each[rank], size))
            hint += "\nStep 1 was right: what is left over from the previous step?" * (step > 0)
            largest = max(part.abs().max().item() for part in each)
            close(where, f"the gradient of {name}", parameter.grad, right, hint=hint, slack=300,
                  scale=largest)
        hint = "Send each bucket once, as one tensor, in every step."
        communication(where, look.events[begun:], {"all_reduce": buckets}, hint)
        if on_way[-1] - begun < len(buckets) - 1:
            raise Wrong(
                f"{where}: when the last gradient was ready, {on_way[-1] - begun} of "
                f"{len(buckets)} buckets were on their way; all but the last could have been.\n"
                "Start a bucket in the hook, as soon as it is complete."
            )
        model.zero_grad()
        del value, parameter
        if (kept := look.kept(allowed=SMALL)) > SMALL:
            raise Wrong(f"{where}: {kept:,} bytes stay after the step, although every\n.grad is "
                        "None. What holds them, and why?")


SCALES = [  # of (gradient, mean, this rank's own, ranks)
    (lambda s: s[3] > 1 and alike(s[0], s[3] * s[1], 300),
     "It is the sum: it is not divided by the number of ranks."),
    (lambda s: alike(s[0], s[2], 300),
     "It is still this rank's own: is every bucket started, waited on and copied back?"),
    (lambda s: True, "Do the values go back to the parameters that they came from?"),
]


def await_file(path: Path, where: str, seconds: float = 3.0) -> None:
    """Wait until rank 0 has finished its backward pass."""
    end = time.monotonic() + seconds
    while not path.exists():
        time.sleep(0.005)
        if time.monotonic() > end:
            raise Wrong(
                f"{where}: rank 0 cannot finish its backward pass before this rank begins its own: "
                "the hook waits, and nothing overlaps.\nIs there a wait (or an all-reduce without "
                "async_op=True) inside the hook? Only wait() may wait."
            )


# ---- d: tree or ring?


def crossover(trial: Trial) -> str:
    """Judge `crossover_bytes` in the file."""
    trial.alone("crossover_bytes", crossovers, trial.new_seed(), seconds=8.0)
    return "at your size, tree and ring take equally long, for 100 drawn cases."


def crossovers(answer, seed: int) -> None:
    """In one process: at the answer's size the two times are equal."""

    def holds(drawn: tuple[int, float, float]) -> None:
        size, alpha, beta = drawn
        case = f"{size} ranks, α = {alpha:.3g} s, β = {beta:.3g} s/byte"
        n = a_number(case, "crossover_bytes", answer.crossover_bytes(size, alpha, beta))
        if (n == math.inf) != (size == 2):
            raise Wrong(
                f"{case}: you say {n:g}. With two ranks the ring sends as many bytes in twice as "
                "many messages:\nit never wins, and the answer is math.inf. With more ranks it "
                "wins above some size."
            )
        if size > 2:
            tree = 2 * math.ceil(math.log2(size)) * (alpha + beta * n)
            ring = 2 * (size - 1) * 2 * (alpha + beta * n / size)
            if not abs(tree - ring) <= max(1e-6 * tree, 4 * beta * math.log2(size)):  # whole bytes
                raise Wrong(
                    f"{case}: at your {n:g} bytes the tree takes {tree:.6g} s and the ring "
                    f"{ring:.6g} s.\nThey must be equal there."
                )

    sizes = st.one_of(st.integers(2, 9), st.integers(9, 10**5))
    for_all(seed, st.tuples(sizes, st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7)), holds)
