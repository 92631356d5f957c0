"""Pipeline schedules: plain lists of what each rank does in which order, and a simulator.

    actions = schedule("1f1b", stages=4, micro_batches=8)     # one list per rank
    check(actions)                                            # ValueError: incomplete, or deadlock
    simulation = simulate(actions)                            # forward 1, backward 2
    simulation.bubble, simulation.peak_in_flight              # 0.27…, (4, 3, 2, 1)

A rank holds one or several *chunks* of the model; chunk c of rank r is global stage c·p + r, with p
ranks. An action is

    F   the forward pass of a micro-batch through a chunk
    B   its backward pass; if the list also has W's, only the gradient of the chunk's input
    W   the gradients of the weights, for which no rank waits

Sources: GPipe arXiv:1811.06965; 1F1B (PipeDream-Flush) arXiv:2006.09503 and interleaved
arXiv:2104.04473, section 2.2; zero bubble, here its ZB-H1, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from utils.shares import share

NAMES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
KINDS = ("F", "B", "W")


class Action(NamedTuple):
    """One action of a rank on one micro-batch (numbered from 0)."""

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f"/{self.chunk}" if self.chunk else "")


Actions = Sequence[Sequence[Action]]  # [rank][place in its order]


# ---- 1. the schedules


def schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """The list of each rank's actions; `stages` is the number of ranks. Raises ValueError.

    gpipe        all forward passes, then all backward passes
    1f1b         each backward pass as early as possible: fewer micro-batches in flight
    interleaved  1f1b with several chunks per rank: a smaller bubble, more messages
    zero-bubble  1f1b with the backward pass in two halves, the second of which fills the bubble
    """
    for what, number in (("stages", stages), ("micro-batches", micro_batches), ("chunks", chunks)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{number!r} {what} make no pipeline: give an integer of at least 1")
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is unknown: use one of {', '.join(NAMES)}")
    if chunks > 1 and name in ("1f1b", "zero-bubble"):
        raise ValueError(
            f"schedule {name!r} has one chunk per rank, not {chunks}: take interleaved or gpipe"
        )
    make = {"gpipe": _gpipe, "1f1b": _1f1b, "interleaved": _interleaved}.get(name, _zero_bubble)
    return [list(make(rank, stages, micro_batches, chunks)) for rank in range(stages)]


def _gpipe(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    for chunk in range(chunks):
        yield from (Action("F", number, chunk) for number in range(micro_batches))
    for chunk in reversed(range(chunks)):
        yield from (Action("B", number, chunk) for number in range(micro_batches))


def _1f1b(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    warm_up = min(stages - 1 - rank, micro_batches)  # what later stages need before they can begin
    yield from (Action("F", number) for number in range(warm_up))
    for number in range(micro_batches - warm_up):
        yield Action("F", warm_up + number)
        yield Action("B", number)
    yield from (Action("B", number) for number in range(micro_batches - warm_up, micro_batches))


def _interleaved(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """1f1b over (micro-batch, chunk) pairs: a group of micro-batches goes through chunk 0, then
    through chunk 1, …, and then the next group follows. A group has p micro-batches, or a few more
    if their number is not a multiple of p: with fewer, ranks would wait in the middle."""
    rounds = max(1, micro_batches // stages)
    groups = [range(*share(micro_batches, index, rounds)) for index in range(rounds)]
    pairs = [(n, c) for group in groups for c in range(chunks) for n in group]
    forward = [Action("F", n, c) for n, c in pairs]
    backward = [Action("B", n, chunks - 1 - c) for n, c in pairs]
    # before the first backward pass the first group must be through all earlier chunks, and each
    # rank before the last is two steps ahead of its successor: one forward, one backward
    ahead = 2 if chunks > 1 else 1
    warm_up = min(ahead * (stages - 1 - rank) + (chunks - 1) * len(groups[0]), len(forward))
    yield from forward[:warm_up]
    for number in range(len(forward) - warm_up):
        yield forward[warm_up + number]
        yield backward[number]
    yield from backward[len(forward) - warm_up :]


def _zero_bubble(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """ZB-H1, in the order of 1f1b. A W waits until p micro-batches are in flight, as many as 1f1b
    keeps on its first rank, or until no forward pass is left."""
    warm_up = min(stages - 1 - rank, micro_batches)
    yield from (Action("F", number) for number in range(warm_up))
    done = 0  # W's
    for number in range(micro_batches):
        if warm_up + number < micro_batches:
            yield Action("F", warm_up + number)
        yield Action("B", number)
        in_flight = min(warm_up + number + 1, micro_batches) - done
        if in_flight >= stages or warm_up + number + 1 >= micro_batches:
            yield Action("W", done)
            done += 1
    yield from (Action("W", number) for number in range(done, micro_batches))


# ---- 2. the dependencies of an action


def needs(action: Action, rank: int, stages: int, chunks: int) -> Iterator[tuple[int, Action]]:
    """The (rank, action) pairs that must be done before this action can begin."""
    kind, number, chunk = action
    stage, last = chunk * stages + rank, stages * chunks - 1
    if kind == "F" and stage > 0:
        yield (stage - 1) % stages, Action("F", number, (stage - 1) // stages)
    elif kind == "B":
        yield rank, Action("F", number, chunk)
        if stage < last:
            yield (stage + 1) % stages, Action("B", number, (stage + 1) // stages)
    elif kind == "W":
        yield rank, Action("B", number, chunk)


def feeds(action: Action, rank: int, stages: int, chunks: int) -> tuple[int, Action] | None:
    """The (rank, action) of the neighbouring stage that uses the result; None at the ends."""
    kind, number, chunk = action
    stage = chunk * stages + rank + {"F": 1, "B": -1, "W": 0}[kind]
    if kind == "W" or not 0 <= stage < stages * chunks:
        return None
    return stage % stages, Action(kind, number, stage // stages)


def counts(actions: Actions) -> tuple[int, int, int]:
    """(ranks, chunks, micro-batches) of a schedule, by its largest numbers."""
    everything = [action for order in actions for action in order]
    if not everything:
        raise ValueError("the schedule is empty: every rank needs a list of actions")
    chunks = 1 + max(action.chunk for action in everything)
    return len(actions), chunks, 1 + max(action.micro_batch for action in everything)


def check(actions: Actions) -> None:
    """Raise ValueError, with one sentence, for a schedule that would not train or never end.

    Each rank must do F and B (and W, if it does any) exactly once per micro-batch and chunk, and
    ranks must not wait for one another in a cycle. Sends do not wait, receives do.
    """
    _, chunks, micro_batches = counts(actions)
    for rank, order in enumerate(actions):
        order = [Action(*action) for action in order]
        kinds = ("F", "B", "W") if any(a.kind == "W" for a in order) else ("F", "B")
        wanted = {
            Action(kind, number, chunk)
            for kind in kinds
            for number in range(micro_batches)
            for chunk in range(chunks)
        }
        for action in order:
            if action not in wanted:
                raise ValueError(
                    f"rank {rank} has the action {tuple(action)}, twice or of an unknown kind: "
                    f"each of {', '.join(kinds)} once for every micro-batch and chunk"
                )
            wanted.remove(action)
        if wanted:
            missing = min(wanted, key=lambda a: (KINDS.index(a.kind), *a[1:]))
            raise ValueError(f"rank {rank} never does {missing}: add it to its list")
    for _ in _in_order(actions):
        pass


def _in_order(actions: Actions) -> Iterator[tuple[int, int, Action, list[tuple[int, Action]]]]:
    """Yield (rank, place, action, its dependencies), each after all its dependencies."""
    stages, chunks, _ = counts(actions)
    place, done = [0] * stages, set()
    total = sum(len(order) for order in actions)
    while len(done) < total:
        before = len(done)
        for rank, order in enumerate(actions):
            while place[rank] < len(order):
                action = Action(*order[place[rank]])
                needed = list(needs(action, rank, stages, chunks))
                if not all(pair in done for pair in needed):
                    break
                done.add((rank, action))
                yield rank, place[rank], action, needed
                place[rank] += 1
        if len(done) == before:
            raise ValueError(_deadlock(actions, place, done))


def _deadlock(actions: Actions, place: list[int], done: set) -> str:
    """A sentence that names what each rank waits for."""
    stages, chunks, _ = counts(actions)
    waits = []
    for rank, order in enumerate(actions):
        if place[rank] < len(order):
            action = Action(*order[place[rank]])
            other, missing = next(
                pair for pair in needs(action, rank, stages, chunks) if pair not in done
            )
            waits.append(f"rank {rank} at {action} waits for {missing} of rank {other}")
    return f"deadlock: {'; '.join(waits)}"


# ---- 3. the simulator


@dataclass(frozen=True)
class Simulation:
    """The cost of a schedule.

    times            per rank: ((action, begin, end), …) in the unit of the costs
    peak_in_flight   per rank: the largest number of micro-batches whose activations it keeps (with
                     v chunks, each chunk counts 1/v)
    """

    times: tuple[tuple[tuple[Action, float, float], ...], ...]
    peak_in_flight: tuple[float, ...]

    @property
    def span(self) -> float:
        """The time from the start to the end of the last action."""
        return max(end for order in self.times for _, _, end in order)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time during which each rank computes."""
        return tuple(sum(end - begin for _, begin, end in order) for order in self.times)

    @property
    def bubble(self) -> float:
        """The fraction of the span during which an average rank is idle, 0 to 1."""
        return 1 - sum(self.busy) / (len(self.times) * self.span)


def simulate(
    actions: Actions,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    weight: float | Sequence[float] = 1.0,
    transfer: float = 0.0,
) -> Simulation:
    """The times of all actions when each begins as early as it can.

    forward    time of one micro-batch's forward pass through a whole rank (each of its v chunks
               takes 1/v of it); or one time per global stage
    backward   the same for the whole backward pass
    weight     the part of `backward` that a W takes, if the schedule has W's; B takes the rest
    transfer   time of a message from one rank to another
    Raises ValueError, as `check` does.
    """
    stages, chunks, _ = counts(actions)

    def per_stage(cost):
        if isinstance(cost, Iterable):
            cost = list(cost)
            if len(cost) != stages * chunks:
                raise ValueError(f"{len(cost)} costs for {stages * chunks} stages: give one each")
            return cost
        return [cost / chunks] * (stages * chunks)

    whole = {"F": per_stage(forward), "B": per_stage(backward), "W": per_stage(weight)}
    split = [any(action[0] == "W" for action in order) for order in actions]
    ends, free = {}, [0.0] * stages
    times = [[] for _ in range(stages)]
    for rank, _, action, needed in _in_order(actions):
        stage = action.chunk * stages + rank
        cost = whole[action.kind][stage]
        if action.kind == "B" and split[rank]:
            cost -= whole["W"][stage]
        arrivals = [ends[pair] + transfer * (pair[0] != rank) for pair in needed]
        begin = max([free[rank], *arrivals])
        ends[rank, action] = free[rank] = begin + cost
        times[rank].append((action, begin, begin + cost))
    return Simulation(tuple(tuple(order) for order in times), in_flight(actions))


def in_flight(actions: Actions) -> tuple[float, ...]:
    """`Simulation.peak_in_flight`, which follows from the order alone."""
    _, chunks, _ = counts(actions)
    peaks = []
    for order in actions:
        release = "W" if any(action[0] == "W" for action in order) else "B"
        kept = peak = 0
        for kind, *_ in order:
            kept += (kind == "F") - (kind == release)
            peak = max(peak, kept)
        peaks.append(peak / chunks)
    return tuple(peaks)
