"""Given: what the check cell of exercise 01c looks at.

1 to 6 real ranks train small networks of drawn widths for three steps with your buckets. The
gradients must be the mean of all ranks'; `utils.measure.traffic` tells when each all-reduce starts
and how many bytes it has.
"""

import datetime
import itertools
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist

from utils.course.assertions import Wrong, close, communication, unchanged
from utils.course.observe import Look
from utils.course.runner import Group, Trial, fractions

STEPS = 3
SMALL = 64  # bytes that may stay after a step: a number or two, no gradients
IN_HOOK = (
    "Is there a wait (or an all-reduce without async_op=True) inside the hook? Only wait() waits."
)


@dataclass(frozen=True)
class Network:
    """What is drawn: a chain of linear layers, of which some weights may be frozen."""

    widths: tuple[int, ...]
    frozen: int  # so many of the first parameters
    dtypes: tuple[torch.dtype, ...]  # of the parameters, in turns
    limit: int  # bytes of a bucket

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

    def buckets(self) -> list[int]:
        """Bytes of each bucket, as the exercise describes them."""
        buckets = []
        learning = [p for p in self.build().parameters() if p.requires_grad]
        for size in reversed([p.numel() * p.element_size() for p in learning]):
            if not buckets or buckets[-1] + size > self.limit:
                buckets.append(0)
            buckets[-1] += size
        return buckets

    def __str__(self):
        frozen = f", the first {self.frozen} parameters frozen" if self.frozen else ""
        dtypes = ", ".join(map(str, self.dtypes)) + " by turns" * (len(self.dtypes) > 1)
        return f"widths {self.widths} in {dtypes}{frozen}, bucket_bytes={self.limit}"


def bucketed(trial: Trial) -> str:
    """Judges `make_buckets` and `BucketedAllReduce` in the file."""
    networks = [_draw(trial, exactly) for exactly in (False, True) * 10]
    networks += [_draw(trial, exactly, mixed=True) for exactly in (False, True) * 5]
    for network, buckets in zip(networks, trial.alone("make_buckets", _buckets, networks)):
        _right_buckets(buckets, network)
    for group in trial.groups():
        for late in (False, True):
            networks = [_draw(trial)] if late else [_draw(trial), _draw(trial)]
            if late and group.size == 2:
                networks = [_draw(trial, large=True)]
            rows = [trial.draw.randrange(1, 9) for _ in range(STEPS)]
            case = group.case(" and, beside it, ".join(map(str, networks)))
            case += ", on a slow network" * late
            odd = trial.draw.randrange(group.size)
            case += f", rank {odd} with a NaN in step 2 and zeros in step 3"
            seen = group.run(case, _train, networks, rows, odd, trial.new_seed(), late=late)
            _right_steps(case, seen, networks, group)
    with tempfile.TemporaryDirectory() as folder, trial.ranks(2) as group:
        for number, network in enumerate((_draw(trial), _draw(trial, many=True))):
            case = group.case(str(network))
            _overlap(case, group.run(case, _late_partner, network, f"{folder}/{number}"))
    return (
        f"gradients are the mean over 1 to 6 ranks, {STEPS} steps in a row, in float32 and\n"
        "float64, with zeros or a NaN on one rank, for one model and for two at once, on a slow\n"
        "network too; one all-reduce a bucket, every gradient's bytes once; buckets leave before\n"
        "the backward pass ends, and it never waits for another rank; nothing is kept."
    )


def _draw(
    trial: Trial,
    exactly: bool = False,
    mixed: bool = False,
    large: bool = False,
    many: bool = False,
) -> Network:
    """exactly: some parameters fill the first bucket to the last byte; mixed: several types; large:
    more than 50,000 numbers in one bucket; many: a bucket for each of 18 parameters."""
    draw = trial.draw
    widths = [draw.randrange(2, 14) for _ in range(10 if many else draw.randrange(4, 7))]
    dtypes = [torch.float32, torch.float64, torch.bfloat16][: 3 if mixed else 2]
    draw.shuffle(dtypes)
    frozen, limit = draw.choice([0, 0, 1, 2]), draw.choice([1, draw.randrange(60, 900), 10**6])
    if large:
        widths[1:3], limit = (draw.randrange(225, 240), draw.randrange(225, 240)), 10**6
    if many:
        frozen, limit = 0, 1
    network = Network(tuple(widths), frozen, tuple(dtypes if mixed else dtypes[:1]), limit)
    if exactly:
        every = Network(network.widths, frozen, network.dtypes, 1).buckets()  # a parameter each
        limit = sum(every[: draw.randrange(1, len(every))])
        network = Network(network.widths, frozen, network.dtypes, limit)
    return network


# ---- on a rank


def _buckets(answer, networks: list[Network]) -> list:
    """The answer's buckets for each network, parameters by number."""
    result = []
    for network in networks:
        parameters = [p for p in network.build().parameters() if p.requires_grad]
        number_of = {p: index for index, p in enumerate(parameters)}
        given = list(parameters)
        buckets = answer.make_buckets(given, network.limit)
        if len(given) != len(parameters) or any(p is not q for p, q in zip(given, parameters)):
            raise Wrong(f"with {network}: make_buckets changes the list that it is given.")
        result.append([[number_of.get(p) for p in bucket] for bucket in buckets])
    return result


def _loss(models: list[torch.nn.Sequential], inputs: list[torch.Tensor]) -> torch.Tensor:
    """The sum of all models' losses; they compute side by side, a layer of each in turn."""
    values = list(inputs)
    for layers in itertools.zip_longest(*models):
        values = [x if layer is None else layer(x) for layer, x in zip(layers, values)]
    return sum(value.square().mean().double() for value in values)


def _learning(models: list[torch.nn.Sequential]) -> dict[str, torch.nn.Parameter]:
    named = [(f"model {n}'s " * (len(models) > 1), model) for n, model in enumerate(models, 1)]
    return {
        whose + name: p for whose, model in named
        for name, p in model.named_parameters() if p.requires_grad
    }


def _train(answer, networks: list[Network], rows: list[int], odd: int, seed: int) -> list[dict]:
    """Three steps on this rank's rows: what each step has left, and this rank's own gradients.

    odd: the rank that has a NaN in the second step and a loss of zero in the third.
    """
    rank, steps = dist.get_rank(), []
    models = [network.build() for network in networks]
    twins = [network.build().double() for network in networks]
    learning, own = _learning(models), list(_learning(twins).values())
    at_last = []  # all-reduces that had started when the last gradient was ready
    look = Look()
    for model in models:
        first = next(p for p in model.parameters() if p.requires_grad)
        first.register_post_accumulate_grad_hook(lambda _: at_last.append(len(look.events)))
    with look:
        reducers = [answer.BucketedAllReduce(m, n.limit) for m, n in zip(models, networks)]
    for step in range(STEPS):
        shape, factor = (rows[step] + rank,), 1.0
        inputs = [
            fractions(seed + 100 * step + 10 * n + rank, *shape, network.widths[0])
            for n, network in enumerate(networks)
        ]
        if (step, rank) == (1, odd):
            inputs[0][0, 0] = torch.nan
        if (step, rank) == (2, odd):
            factor = 0.0
        right = torch.autograd.grad(factor * _loss(twins, inputs), own)
        inputs = [x.to(network.dtypes[0]) for x, network in zip(inputs, networks)]
        before = len(look.events)
        with look:
            (factor * _loss(models, inputs)).backward()
            after_backward = len(look.events)
            for reducer in reducers:
                reducer.wait()
        steps.append({
            "gradients": {n: None if p.grad is None else p.grad.clone()
                          for n, p in learning.items()},
            "own": dict(zip(learning, right)),
            "changed": [n for (n, p), q in zip(learning.items(), own)
                        if not q.to(p.dtype).equal(p)],
            "events": look.events[before:],
            "at_last": at_last[-1] - before,
            "in_backward": after_backward - before,
        })
        for parameter in learning.values():
            parameter.grad = None
        steps[-1]["kept"] = look.kept(allowed=SMALL)
    return steps


def _late_partner(answer, network: Network, folder: str) -> bool:
    """Rank 1 begins its backward pass only after rank 0 has ended its own."""
    done = dist.FileStore(f"{folder}-store", 2)
    model = network.build()
    reducer = answer.BucketedAllReduce(model, network.limit)
    loss = model(torch.ones(3, network.widths[0], dtype=network.dtypes[0])).square().mean()
    in_time = True
    if dist.get_rank() == 1:
        in_time = _wait_for(done, seconds=3.0)
    loss.backward()
    if dist.get_rank() == 0:
        done.set("backward ended", "yes")
    reducer.wait()
    return in_time


def _wait_for(store: dist.Store, seconds: float) -> bool:
    try:
        store.wait(["backward ended"], datetime.timedelta(seconds=seconds))
    except RuntimeError:  # the time is over
        return False
    return True


# ---- what is wrong, in words


def _right_buckets(buckets: list[list[int]], network: Network) -> None:
    case, model = f"with {network}", network.build()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    order = [index for bucket in buckets for index in bucket]
    if None in order:
        raise Wrong(f"{case}: make_buckets returns something that is none of its parameters.")
    lost = [name for index, name in enumerate(names) if index not in order]
    if lost:
        raise Wrong(
            f"{case}: make_buckets leaves out {', '.join(lost)}.\n"
            "The last bucket counts too, though it is not full."
        )
    if order != list(range(len(names)))[::-1]:
        raise Wrong(
            f"{case}: make_buckets puts the parameters into the order {order};\n"
            "the backward pass makes the last layer's gradients first."
        )
    sizes = dict(
        enumerate(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    )
    mine = [sum(sizes[index] for index in bucket) for bucket in buckets]
    if mine != network.buckets():
        raise Wrong(
            f"{case}: make_buckets makes {len(buckets)} buckets, of {mine} bytes, not "
            f"{len(network.buckets())}, of {network.buckets()}."
        )


def _right_steps(case: str, ranks: list[list[dict]], networks: list[Network], group: Group) -> None:
    for number, rows in enumerate(zip(*ranks)):
        mean = {name: sum(row["own"][name] for row in rows) / group.size for name in rows[0]["own"]}
        terms = {name: max(_size(row["own"][name]) for row in rows) for name in mean}
        for rank, row in enumerate(rows):
            where = f"{case}, rank {rank}, step {number + 1}"
            for name, right in mean.items():
                got = row["gradients"][name]
                if got is None:
                    raise Wrong(f"{where}: {name} has no gradient after wait().")
                hint = _why(got, right, row["own"][name], group.size, first=number == 0)
                close(where, f"the gradient of {name}", got, right, hint=hint, slack=300,
                      scale=terms[name])
            _right_reduces(where, row, networks)
            unchanged(where, row["changed"], "Only gradients travel.")
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            if step["kept"] > SMALL:
                raise Wrong(
                    f"{case}, rank {rank}, step {number + 1}: {step['kept']:,} bytes stay after "
                    "the step, though all\n.grad are None. Who holds them, and for what?"
                )


def _size(gradient: torch.Tensor) -> float:
    """Of its largest number that is one."""
    return gradient.nan_to_num(0.0, 0.0, 0.0).abs().max().item()


def _why(got, mean, own, size: int, first: bool) -> str:
    """What wrong gradients look like."""

    def same(other):
        return bool((got.double() - other).abs().max() <= 1e-4 * other.abs().max())

    if same(size * mean):
        hint = f"It is {size} times the mean: the sum is not divided by the ranks."
    elif same(own):
        hint = "It is still this rank's own: does every bucket start, come back and get copied?"
    else:
        hint = "Do the numbers go back to the parameters that they came from?"
    return hint + ("" if first else "\nStep 1 was right: what is left over from the step before?")


def _right_reduces(where: str, step: dict, networks: list[Network]) -> None:
    expected = [size for network in networks for size in network.buckets()]
    hint = "Send each bucket once, as one tensor, in every step."
    communication(where, step["events"], {"all_reduce": expected}, hint)
    if step["in_backward"] == 0:
        raise Wrong(
            f"{where}: no all-reduce starts before the backward pass has ended: nothing "
            "overlaps.\nStart a bucket in the hook, as soon as it is complete."
        )
    if step["at_last"] < len(expected) - len(networks):
        raise Wrong(
            f"{where}: when the last gradient was ready, {step['at_last']} of "
            f"{len(expected)} buckets were on their way, and all but "
            f"{'one' if len(networks) == 1 else 'two'} could be."
        )


def _overlap(case: str, in_time: list[bool]) -> None:
    if not all(in_time):
        raise Wrong(
            f"{case}: rank 0 cannot end its backward pass before rank 1 has begun its own: the "
            f"hook waits, and nothing overlaps.\n{IN_HOOK}"
        )
