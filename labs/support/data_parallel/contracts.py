"""Given: what the exercises ask for, and how their check cells judge it."""

import itertools
import math
import numbers
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from labs.support.data_parallel.mpirun import mpirun
from labs.support.data_parallel.timeline import timeline
from utils.course.assertions import Wrong, close, communication, described, unchanged
from utils.course.contract import BOTH, LARGE, Call, Case, Contract, Seen, observed, wider
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import SIZES, Trial, fractions
from utils.ranks import RankError

# ---- a: over MPI


def data_parallel(trial: Trial) -> str:
    """Judges the three functions and the training in the file; mpi_rank.py looks at them."""
    program, file = str(Path(__file__).with_name("mpi_rank.py")), str(trial.path)
    with tempfile.TemporaryDirectory() as folder:
        done = mpirun(6, program, file, folder, str(trial.new_seed()), folder=trial.path.parent)
        shown = done.stdout.splitlines()
        print("\n".join([*shown[:20], "…"] if len(shown) > 20 else shown), end="\n" * bool(shown))
        said = {kind: [path.read_text() for path in sorted(Path(folder).glob(f"*.{kind}"))]
                for kind in ("task", "wrong", "stack")}
    if said["task"]:
        raise NotImplementedError(said["task"][0])
    if said["wrong"]:
        raise Wrong(said["wrong"][0])
    for case, stack in (text.split("\n", 1) for text in said["stack"] if "File" in text):
        place = re.search(rf'File "{re.escape(file)}", (line \d+) in (\w+)', stack)
        where = f"{case}: one rank is in {trial.path.name} {place[1]} ({place[2]})" * bool(place)
        if "in collective" in stack:
            raise Wrong(
                f"the ranks wait for each other: {where or case}.\nEvery rank must call the same "
                "collectives in the same order."
            )
        raise Wrong(f"no end: an endless loop?\n{where or case}")
    if done.returncode:
        raise Wrong(f"mpirun ended with code {done.returncode}:\n{done.stderr.strip()[-600:]}")
    return (
        "the learning curve of 1 to 6 ranks is that of one rank, for batches of\n"
        "many sizes; up to 64 ranks share out many numbers of rows, every row once; ranks have\n"
        "different numbers of rows, or none; one broadcast, then one all-reduce a step on each\n"
        "rank, of as many bytes as the parameters."
    )


# ---- b, d, e: sums, from messages


BLOCKED = {  # questions, by what all ranks wait in
    "send": "dist.send comes back only when the other rank has begun to receive: when all ranks "
    "send\nfirst, no one ever receives. Let one of two neighbours receive first.",
    "recv": "All ranks wait to receive, and nobody sends: who begins?",
    "": "Who sends what a waiting rank is to receive, and who receives what it sends? Does every "
    "rank\ntake part, and in the same order?",
}


def only_messages(where: str, calls: list[Call]) -> None:
    """Sends and receives alone."""
    for rank, call in enumerate(calls):
        if other := {event.op for event in call.events} - {"send", "recv"}:
            raise Wrong(
                f"{where}: rank {rank} calls {', '.join(sorted(other))}; build it yourself from "
                "sends and receives."
            )


def exchange_messages(where: str, case: "Lengths", calls: list[Call]) -> None:
    """One send of all that a rank has, one receive of all that the one before it has."""
    for rank, call in enumerate(calls):
        out, back = (case.lengths[r] * case.dtype.itemsize for r in (rank, rank - 1))
        sent = [(event.op, event.payload) for event in call.events]
        if sorted(sent) != [("recv", back), ("send", out)]:
            raise Wrong(
                f"{where}, rank {rank}: it calls {sent}; one send of {out} bytes and one recv of "
                f"{back} will do.{wider(call)}"
            )


def ring_messages(where: str, case: Case, calls: list[Call]) -> None:
    """2(N-1) messages of at most ⌈length/N⌉ numbers, all to one neighbour."""
    only_messages(where, calls)
    n, itemsize = len(calls), calls[0].result.itemsize
    length, right = calls[0].result.numel(), 2 * (n - 1)
    part = math.ceil(length / n) * itemsize
    for rank, call in enumerate(calls):
        biggest = max((event.payload for event in call.sends), default=0)
        if biggest > part:
            wide = wider(call)
            whole = ", the whole tensor," if biggest == length * itemsize and not wide else ""
            parts = "\nCut the tensor into N parts, and send one part at a time."
            raise Wrong(
                f"{where}: rank {rank} sends a message of {biggest} bytes{whole} where a ring "
                f"sends at most {part}: one part of N.{wide or parts}"
            )
        if len(peers := {event.peer for event in call.sends}) > 1:
            raise Wrong(
                f"{where}: rank {rank} sends to ranks {sorted(peers)}; in a ring it sends to one "
                "neighbour only."
            )
        full = length >= n  # else some parts are empty, and need not be sent
        if len(call.sends) > right or (full and len(call.sends) < right):
            raise Wrong(
                f"{where}: rank {rank} sends {len(call.sends)} messages where a ring sends "
                f"2(N-1) = {right}: N-1 that add and N-1 that copy."
            )


def asynchronous_messages(where: str, case: Case, calls: list[Call]) -> None:
    """Those of a ring, and each rank receives while it sends."""
    ring_messages(where, case, calls)
    taken, steps = timeline([call.notes for call in calls]), 2 * (len(calls) - 1)
    if taken > steps:
        raise Wrong(
            f"{where}: the ring takes as long as {taken} messages one after another; when every "
            f"rank sends\nand receives at the same time, it takes 2(N-1) = {steps}. What has a "
            "rank started when it waits?"
        )


def tree_messages(where: str, case: Case, calls: list[Call]) -> None:
    """None is larger than the tensor, and 2·⌈log2 N⌉ at most follow one another."""
    only_messages(where, calls)
    whole = calls[0].result.numel() * calls[0].result.itemsize
    for rank, call in enumerate(calls):
        for event in call.sends:
            if event.payload > whole:
                raise Wrong(
                    f"{where}: rank {rank} sends a message of {event.payload:,} bytes, and the "
                    f"whole tensor has {whole:,}.{wider(call)}"
                )
    steps = 2 * math.ceil(math.log2(len(calls)))
    if (path := timeline([call.notes for call in calls], at_once=False)) > steps:
        raise Wrong(
            f"{where}: {path} messages follow one another, a tree has at most "
            f"2·⌈log2 {len(calls)}⌉ = {steps}.\nA rank sends or receives one message at a time: "
            "let more pairs talk at once."
        )



def others_have_it(seen: Seen) -> list[int]:
    """The ranks with the right sum, where this one is not among them."""
    have = [
        rank for rank, call in enumerate(seen.calls)
        if torch.allclose(call.result.double(), seen.right, equal_nan=True)
    ]
    return [] if seen.rank in have else have


def own_places(seen: Seen) -> list[int]:
    return (seen.result == seen.own[0]).flatten().nonzero().flatten().tolist()[:8]


def still_own(seen: Seen) -> str:
    odd = "\nLengths that N does not divide need parts of different lengths."
    return (
        f"Places {own_places(seen)} still hold rank {seen.rank}'s own numbers: which part has them?"
        + odd * bool(seen.right.numel() % seen.size)
    )


SYMPTOMS = [
    (others_have_it, lambda seen: f"Ranks {others_have_it(seen)} have the sum: who sends it to "
     f"rank {seen.rank}?"),
    (lambda seen: seen.result.equal(seen.own[0]),
     "The tensor is as it was: change it in place, not a copy."),
    (own_places, still_own),
    (lambda seen: True,
     "Which part does each rank send in each step? Print the part's number and rank."),
]


@dataclass(frozen=True)
class Lengths:
    """Of the ranks' messages, which differ."""

    lengths: list[int]
    dtype: torch.dtype
    seed: int
    late: bool
    calls: int = 1

    def message(self, rank: int) -> torch.Tensor:
        return fractions(self.seed + rank, self.lengths[rank], dtype=self.dtype)

    def __str__(self) -> str:
        return f"messages of {self.lengths} numbers of {self.dtype} to exchange"


def lengths(trial: Trial, n: int) -> list[Lengths]:
    """For `exchange`: short messages, and some that travel slowly, on two ranks long ones."""
    drawn = [[trial.draw.randrange(1, 50) for _ in range(n)] for _ in BOTH]
    drawn[1] = [LARGE * (n == 2) + length for length in drawn[1]]
    return [Lengths(*one, trial.new_seed(), late) for *one, late in zip(drawn, BOTH, (False, True))]


def to_exchange(case: Lengths, rank: int, n: int, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    """outgoing and incoming."""
    return case.message(rank), torch.zeros_like(case.message((rank - 1) % n))


def of_the_previous(case: Lengths, given: list, rank: int) -> torch.Tensor:
    return given[rank - 1][0].double()


def own_tensor(case: Case, rank: int, n: int, call: int) -> tuple[torch.Tensor]:
    return (case.numbers(rank, n, call),)


def the_sum(case: Case, given: list, rank: int) -> torch.Tensor:
    return sum(own.double() for (own,) in given)


SUMS = "in many shapes, small and large, float32 and float64,\n"
EXCHANGE = Contract(
    "exchange", to_exchange, of_the_previous, cases=lengths, sizes=(2, 3, 4, 5, 6), in_place=1,
    result="`incoming`", messages=exchange_messages, slack=0.0,
)
RING = Contract(
    "ring_all_reduce", own_tensor, the_sum, sizes=(*SIZES, 9), in_place=0, result="the sum",
    same_bits=True, messages=ring_messages, symptoms=SYMPTOMS, hang=BLOCKED, first=(EXCHANGE,),
    says=f"the sums of 1 to 6 and of 9 ranks {SUMS}"
    "the same bits on all, on a slow network too; every rank sends 2(N-1) messages of at most\n"
    "⌈length/N⌉ numbers, all to one neighbour; no deadlock, though every send blocks.",
)
TREE = Contract(
    "tree_all_reduce", own_tensor, the_sum, sizes=(*SIZES, 17), in_place=0, result="the sum",
    messages=tree_messages, symptoms=SYMPTOMS, hang=BLOCKED,
    says=f"the sums of 1 to 6 and of 17 ranks {SUMS}"
    "on a slow network too; no message is larger than the tensor, and at most 2·⌈log2 N⌉ "
    "follow\none another.",
)
ASYNCHRONOUS_RING = Contract(
    "asynchronous_ring_all_reduce", own_tensor, the_sum, sizes=(*SIZES, 9), in_place=0,
    result="the sum", same_bits=True, messages=asynchronous_messages, symptoms=SYMPTOMS,
    hang="Who waits for a message that nobody has started to send?",
    says=f"the sums of 1 to 6 and of 9 ranks {SUMS}"
    "the same bits on all, on a slow network too; every rank sends 2(N-1) messages of at most\n"
    "⌈length/N⌉ numbers, and receives at the same time: the ring takes as long as 2(N-1).",
)
ring, tree, asynchronous_ring = RING.judge, TREE.judge, ASYNCHRONOUS_RING.judge


def show_messages(file: str, function: str, size: int, length: int) -> None:
    """Prints the messages that each rank sends for a tensor of `length` 8-byte numbers."""
    job, case = (function, own_tensor, 0), Case((length,), torch.float64, seed=1)
    try:
        results = Trial(file).on_ranks(size, observed, job, case)
    except (RankError, Wrong, SyntaxError, NotImplementedError):
        print(f"There are no messages to show yet: {file} does not run.")
        return
    for rank, (call,) in enumerate(results):
        listed = ", ".join(f"{event.payload:,} → {event.peer}" for event in call.sends) or "none"
        print(f"rank {rank} sends (bytes → rank): {listed}")


# ---- c: buckets

STEPS = 3
SMALL = 64  # bytes that may stay after a step: a number or two, no gradients


@dataclass(frozen=True)
class Network:
    """A chain of linear layers.

    frozen: so many of the first parameters do not learn; dtypes: of the parameters, in turns;
    limit: bytes of a bucket, or 0: two of the parameters fill the first one to the last byte.
    """

    widths: tuple[int, ...]
    frozen: int
    dtypes: tuple[torch.dtype, ...]
    limit: int

    @staticmethod
    def drawn(draw: Random, types: int = 1, **given: int | tuple) -> "Network":
        widths = [draw.randrange(2, 14) for _ in range(draw.randrange(3, 7))]
        dtypes = draw.sample([torch.float32, torch.float64, torch.bfloat16][: types + 1], types)
        limit = draw.choice([0, 1, draw.randrange(60, 900), 10**6])
        drawn = {"widths": tuple(widths), "frozen": draw.choice([0, 1, 2]),
                 "dtypes": tuple(dtypes), "limit": limit}
        return Network(**drawn | given)

    def build(self) -> torch.nn.Sequential:
        layers = []
        for inputs, outputs in itertools.pairwise(self.widths):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
        network = torch.nn.Sequential(*layers)
        for number, parameter in enumerate(network.parameters()):
            dtype = self.dtypes[number % len(self.dtypes)]
            parameter.data = fractions(number, *parameter.shape, dtype=dtype)
            parameter.data /= parameter.shape[-1] ** 0.5
            parameter.requires_grad_(number >= self.frozen)
        return network

    @property
    def bytes(self) -> list[int]:
        """Of each parameter that learns."""
        return [p.nbytes for p in self.build().parameters() if p.requires_grad]

    @property
    def bucket_bytes(self) -> int:
        return self.limit or sum(self.bytes[-2:])

    def buckets(self) -> list[list[int]]:
        """The numbers of the parameters in each bucket, as the exercise describes them."""
        buckets, space = [], 0
        for number, size in reversed([*enumerate(self.bytes)]):
            if size > space:
                buckets.append([])
                space = self.bucket_bytes
            buckets[-1].append(number)
            space -= size
        return buckets

    def __str__(self) -> str:
        frozen = f", the first {self.frozen} parameters frozen" if self.frozen else ""
        dtypes = ", ".join(map(str, self.dtypes)) + " by turns" * (len(self.dtypes) > 1)
        return f"widths {self.widths} in {dtypes}{frozen}, bucket_bytes={self.bucket_bytes}"


def bucketed(trial: Trial) -> str:
    """Judges `make_buckets` and `BucketedAllReduce` in the file."""
    trial.alone("make_buckets", right_buckets, trial.new_seed())
    for group in trial.groups():
        for late in (False, True):
            networks = [Network.drawn(trial.draw)]
            if not late:  # a bucket for each parameter; and another model beside it
                many = tuple(trial.draw.randrange(2, 14) for _ in range(10))
                networks.append(Network.drawn(trial.draw, widths=many, frozen=0, limit=1))
            elif group.size == 2:  # more than 50,000 numbers in one message
                widths = (3, *(trial.draw.randrange(225, 240) for _ in range(2)), 5)
                networks = [Network.drawn(trial.draw, widths=widths, limit=10**6)]
            rows = [trial.draw.randrange(1, 9) for _ in range(STEPS)]
            odd = trial.draw.randrange(group.size)
            case = group.case(" and, beside it, ".join(map(str, networks)))
            case += ", on a slow network" * late
            case += f", rank {odd} with a NaN in step 2 and zeros in step 3"
            with tempfile.TemporaryDirectory() as folder:
                job = networks, rows, odd, trial.new_seed(), Path(folder)
                group.run(case, steps, case, *job, late=late)
    return (
        f"gradients are the mean over 1 to 6 ranks, {STEPS} steps in a row, in float32 and\n"
        "float64, with zeros or a NaN on one rank, for one model and for two at once, on a slow\n"
        "network too; one all-reduce a bucket, every gradient's bytes once; buckets leave before\n"
        "the backward pass ends, and it never waits for another rank; nothing is kept."
    )


def right_buckets(answer, seed: int) -> None:
    """Runs alone: the answer's buckets are those of the exercise, for any network."""

    def holds(network: Network) -> None:
        parameters = [p for p in network.build().parameters() if p.requires_grad]
        number_of, given = {p: number for number, p in enumerate(parameters)}, list(parameters)
        buckets = answer.make_buckets(given, network.bucket_bytes)
        mine, right = [[number_of.get(p) for p in bucket] for bucket in buckets], network.buckets()
        order = list(itertools.chain(*mine))
        hint = "How many bytes has each, and when is a bucket full?"
        if order != list(itertools.chain(*right)):
            hint = "The backward pass makes the last layer's gradients first."
        if len(order) < len(parameters):
            hint = "Some are left out: the last bucket counts too, though it is not full."
        if mine != right:
            raise Wrong(
                f"with {network}, parameters of {network.bytes} bytes: make_buckets makes the "
                f"buckets {mine}, and {right} is right.\n{hint}"
            )
        if list(map(id, given)) != list(map(id, parameters)):
            raise Wrong(f"with {network}: make_buckets changes the list that it is given.")

    randoms = st.randoms(use_true_random=False)
    for_all(seed, randoms.map(lambda draw: Network.drawn(draw, draw.randrange(1, 4))), holds)


def steps(answer, case: str, networks: list[Network], rows: list[int], odd: int, seed: int,
          folder: Path) -> None:
    """Runs on a rank: three steps beside networks in float64 that know all ranks' rows.

    odd: the rank that has a NaN in the second step and a loss of zero in the third. No rank but 0
    begins its backward pass before rank 0 has ended its own.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    models, twins = ([network.build() for network in networks] for _ in range(2))
    mine, theirs = learning(models), list(learning([twin.double() for twin in twins]).values())
    look, on_way = Look(**mine), []  # how many buckets, when the last gradient was ready
    for model in models:
        first = next(p for p in model.parameters() if p.requires_grad)
        first.register_post_accumulate_grad_hook(lambda _: on_way.append(len(look.events)))
    with look:
        reducers = [answer.BucketedAllReduce(model, network.bucket_bytes)
                    for model, network in zip(models, networks)]
    sizes = [(network.bytes, network.buckets()) for network in networks]
    buckets = [sum(each[i] for i in bucket) for each, made in sizes for bucket in made]

    def loss(models: list[torch.nn.Module], step: int, rank: int) -> torch.Tensor:
        """The sum of all models' losses; they compute side by side, a layer of each in turn."""
        shape, values = (rows[step] + rank,), []
        for model, network in zip(models, networks):
            x = fractions(seed + 10 * step + rank, *shape, network.widths[0])
            if (step, rank) == (1, odd):
                x[0, 0] = torch.nan
            values.append(x.to(next(model.parameters()).dtype))
        for layers in itertools.zip_longest(*models):
            values = [x if layer is None else layer(x) for layer, x in zip(layers, values)]
        return sum(x.square().mean().double() for x in values) * ((step, rank) != (2, odd))

    for step in range(STEPS):
        where, begun = f"{case}, rank {rank}, step {step + 1}", len(look.events)
        own = [torch.autograd.grad(loss(twins, step, other), theirs) for other in range(size)]
        with look:
            value = loss(models, step, rank)
            if rank:
                await_file(folder / f"{step}", where)
            value.backward()
            (folder / f"{step}").touch()
            for reducer in reducers:
                reducer.wait()
        for (name, parameter), *parts in zip(mine.items(), *own):
            mean, got = sum(parts) / size, parameter.grad
            if got is None:
                raise Wrong(f"{where}: {name} has no gradient after wait().")
            largest = max(part.nan_to_num(0.0).abs().max().item() for part in parts)
            hint = why(got, mean, parts[rank], size, step)
            close(where, f"the gradient of {name}", got, mean, hint=hint, slack=300, scale=largest)
        hint = "Send each bucket once, as one tensor, in every step."
        communication(where, look.events[begun:], {"all_reduce": buckets}, hint)
        if on_way[-1] - begun < len(buckets) - len(networks):
            raise Wrong(
                f"{where}: when the last gradient was ready, {on_way[-1] - begun} of "
                f"{len(buckets)} buckets were on their way, and all but the last could be.\n"
                "Start a bucket in the hook, as soon as it is complete."
            )
        unchanged(where, look.changed(), "Only gradients travel.")
        for parameter in mine.values():
            parameter.grad = None
        del value, got, parameter
        if (kept := look.kept(allowed=SMALL)) > SMALL:
            raise Wrong(f"{where}: {kept:,} bytes stay after the step, though all\n.grad are None. "
                        "Who holds them, and for what?")


def learning(models: list[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """By name."""
    named = [(f"model {n}'s " * (len(models) > 1), model) for n, model in enumerate(models, 1)]
    return {whose + name: p for whose, model in named
            for name, p in model.named_parameters() if p.requires_grad}


def await_file(path: Path, where: str, seconds: float = 3.0) -> None:
    """Until rank 0 has ended its backward pass."""
    end = time.monotonic() + seconds
    while not path.exists():
        time.sleep(0.005)
        if time.monotonic() > end:
            raise Wrong(
                f"{where}: rank 0 cannot end its backward pass before this rank has begun its own: "
                "the hook waits, and nothing overlaps.\nIs there a wait (or an all-reduce without "
                "async_op=True) inside the hook? Only wait() waits."
            )


def why(got: torch.Tensor, mean: torch.Tensor, own: torch.Tensor, size: int, step: int) -> str:
    """What wrong gradients look like."""
    symptoms = [
        (size * mean, f"It is {size} times the mean: the sum is not divided by the ranks."),
        (own, "It is still this rank's own: does every bucket start, come back and get copied?"),
    ]
    words = next((words for seen, words in symptoms if torch.allclose(got.double(), seen, 1e-4)),
                 "Do the numbers go back to the parameters that they came from?")
    return words + "\nStep 1 was right: what is left over from the step before?" * (step > 0)


# ---- d: tree or ring?


def crossover(trial: Trial) -> str:
    """Judges `crossover_bytes` in the file."""
    trial.alone("crossover_bytes", crossovers, trial.new_seed(), seconds=8.0)
    return "at your size, tree and ring take equally long, for 100 numbers of ranks."


def crossovers(answer, seed: int) -> None:
    """Runs alone: at the answer's size the two times themselves are equal."""

    def holds(drawn: tuple[int, float, float]) -> None:
        size, alpha, beta = drawn
        case = f"{size} ranks, α = {alpha:.3g} s, β = {beta:.3g} s/byte"
        n = answer.crossover_bytes(size, alpha, beta)
        if isinstance(n, bool) or not isinstance(n, numbers.Real):
            raise Wrong(f"{case}: crossover_bytes returns {described(n)}, which is no number.")
        if size == 2 and n != math.inf:
            raise Wrong(
                f"{case}: you say {float(n):g}. With two ranks the ring sends as many bytes and "
                "twice the\nmessages: it never wins, so the answer is math.inf."
            )
        if size > 2 and not math.isfinite(n):
            raise Wrong(f"{case}: you say {n}; from some size on the ring sends fewer bytes.")
        if size > 2:
            tree = 2 * math.ceil(math.log2(size)) * (alpha + beta * float(n))
            ring = 2 * (size - 1) * 2 * (alpha + beta * float(n) / size)
            if abs(tree - ring) > max(1e-6 * tree, 4 * beta * math.log2(size)):  # whole bytes pass
                raise Wrong(
                    f"{case}: at your {float(n):g} bytes the tree takes {tree:.6g} s and the ring "
                    f"{ring:.6g} s.\nThey must be equal there."
                )

    near_powers = st.builds(lambda k, more: 2**k + more, st.integers(2, 20), st.integers(-1, 1))
    sizes = st.one_of(st.integers(2, 8), st.integers(9, 10**5), near_powers, st.just(2**29))
    for_all(seed, st.tuples(sizes, st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7)), holds)
