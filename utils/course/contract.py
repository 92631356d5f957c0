"""A check as data: what a function must do on N ranks, and one runner that tests all of it.

    RING = Contract(
        "ring_all_reduce",
        inputs=lambda case, rank, n, call: (case.numbers(rank, n, call),),
        right=lambda case, given, rank: sum(x.double() for (x,) in given),
        in_place=0, same_bits=True, messages=ring_messages,
        symptoms=[(lambda seen: seen.result.equal(seen.own[0]), "It is as it was.")],
        says="the sums of 1 to 6 ranks …",
    )
    check("lab 01b ring all-reduce", RING.judge, "ring.py")

Each case tests the values (against float64, NaN where the reference has it), the memory next to an
in-place argument, that inputs stay unchanged, that every message is waited on, what is kept from
call to call, and the contract's claims about bits and messages; some cases run on a network that
delivers late.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from utils.course.assertions import SLACK, Wrong, close, same_bits, told, unchanged
from utils.course.messages import Note, never_waited, noted
from utils.course.observe import Look
from utils.course.runner import SIZES, Group, Trial, fractions
from utils.measure.traffic import Event, tensors_in
from utils.ranks.pool import PRELOADED

PRELOADED.append(__name__)
EDGE = 3  # elements on either side of an in-place tensor
LARGE = 50_000  # elements: more than any message of the small cases has
BOTH = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Case:
    """A different tensor on each rank, for `calls` calls, in float32 and float64 in turn.

    odd: what the last rank has, "zeros" or "one NaN" or ""
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    odd: str = ""
    late: bool = False
    calls: int = 1

    def numbers(self, rank: int, size: int, call: int = 0) -> torch.Tensor:
        """The tensor that `rank` of `size` passes in a call."""
        dtype = BOTH[(BOTH.index(self.dtype) + call) % 2]
        x = fractions(self.seed + 100 * call + rank, *self.shape, dtype=dtype)
        if rank == size - 1 and self.odd == "zeros":
            x.zero_()
        elif rank == size - 1 and self.odd and x.numel():
            x.view(-1)[x.numel() // 2] = torch.nan
        return x

    def __str__(self) -> str:
        if self.calls > 1:
            return f"tensors of shape {self.shape}, float32 and float64 in turn"
        odd = f", {self.odd} on the last rank" if self.odd else ""
        return f"a tensor of shape {self.shape}, {self.dtype}{odd}"


def tensors(trial: Trial, n: int) -> list[Case]:
    """On 2 and 3 ranks: lengths that n divides and does not, none, one, many; both types; odd
    ranks; several calls. On other numbers of ranks, where formulas of n are tested: three cases."""
    draw, some = trial.draw, [trial.draw.choice(BOTH) for _ in range(7)]
    shapes = [
        (n * draw.randrange(2, 9),), (draw.randrange(n), draw.randrange(1, 5)), (),
        (n * draw.randrange(1, 40) + 1,), (draw.randrange(2, 9), draw.randrange(2, 9)), (0,),
        (draw.randrange(1, 3), draw.randrange(2, 5), draw.randrange(200, 300)),
    ]
    odd = {4: "one NaN", 6: "zeros"}
    cases = [
        Case(shape, dtype, trial.new_seed(), odd.get(number, ""), late=number == 3)
        for number, (shape, dtype) in enumerate(zip(shapes, some))
    ]
    if n not in (2, 3):
        return cases[1:4]
    large = (n, LARGE + draw.randrange(1, 999))
    cases.append(Case(large, draw.choice(BOTH), trial.new_seed(), late=n == 3))
    again = (draw.randrange(300, 400),)
    return [*cases, Case(again, BOTH[0], trial.new_seed(), calls=4)]


@dataclass(frozen=True)
class Call:
    """A call of the function on one rank, and what it did."""

    given: tuple
    result: torch.Tensor
    beside: bool  # whether memory next to the in-place argument was changed
    changed: list[str]  # inputs that the call changed
    notes: list[Note]
    events: list[Event]
    kept: int  # bytes that this call and earlier ones allocated and that are still held

    @property
    def sends(self) -> list[Event]:
        """Its messages to other ranks: `.peer`, `.payload` in bytes."""
        return [event for event in self.events if event.op == "send"]


@dataclass(frozen=True)
class Seen:
    """One call on all ranks, as `rank` sees it."""

    rank: int
    right: torch.Tensor
    calls: list[Call]  # by rank

    @property
    def size(self) -> int:
        return len(self.calls)

    @property
    def own(self) -> tuple:
        """The rank's own arguments."""
        return self.calls[self.rank].given

    @property
    def result(self) -> torch.Tensor:
        return self.calls[self.rank].result


Words = str | Callable[[Seen], str]


@dataclass(frozen=True)
class Contract:
    """What `function` of an answer promises.

    inputs     (case, rank, n, call) -> its arguments
    right      (case, [arguments of each rank], rank) -> the result, in float64
    cases      (trial, n) -> the cases drawn for n ranks: str, `.late`, `.calls`
    in_place   index of the argument that becomes the result; None: the result is returned
    result     its name in messages
    same_bits  all ranks have the same bits
    messages   (where, case, [a Call of each rank]) -> raises Wrong
    symptoms   [(test(seen), words)]: signs of a wrong result; the first that holds is printed
    slack      roundings, as in `close`; 0: equal
    hang       what to ask when ranks wait for one another, as in `Trial.ranks`
    library    what must not be used, as in `Trial.forbid`
    says       what was tested, for a correct answer
    """

    function: str
    inputs: Callable[..., tuple]
    right: Callable[..., torch.Tensor]
    cases: Callable[[Trial, int], Iterable[Any]] = tensors
    sizes: Sequence[int] = SIZES
    in_place: int | None = None
    result: str = "the result"
    same_bits: bool = False
    messages: Callable[[str, Any, list[Call]], None] | None = None
    symptoms: Sequence[tuple[Callable[[Seen], Any], Words]] = ()
    slack: float = SLACK
    hang: str | dict[str, str] = ""
    library: Sequence[str] = ()
    says: str = ""

    def judge(self, trial: Trial) -> str:
        """What was tested, for `check`; raises Wrong."""
        if self.library:
            trial.forbid(self.library)
        for group in trial.groups(self.sizes, self.hang):
            self.kept_by(trial, group)
        return self.says

    def kept_by(self, trial: Trial, group: Group) -> None:
        """Test all cases on these ranks; raises Wrong."""
        for case in self.cases(trial, group.size):
            where = group.case(f"{case}{', on a slow network' * case.late}")
            job = self.function, self.inputs, self.in_place
            seen = group.run(where, observed, job, case, late=case.late)
            for number, calls in enumerate(zip(*seen), start=1):
                again = f", call {number}" if case.calls > 1 else ""
                self._right(where + again, case, list(calls))
            for rank, calls in enumerate(seen):
                held = [call.kept for call in calls]
                if len(held) > 3 and held[1] < held[2] < held[3]:
                    raise Wrong(
                        f"{where}, rank {rank}: after each call more bytes are kept, "
                        f"{', '.join(f'{count:,}' for count in held)}.\nWhat is added to a list "
                        "and never removed?"
                    )

    def _right(self, where: str, case: Any, calls: list[Call]) -> None:
        given = [call.given for call in calls]
        terms = sum(largest(arguments) for arguments in given)
        for rank, call in enumerate(calls):
            here, right = f"{where}, rank {rank}", self.right(case, given, rank)
            told = self._told(Seen(rank, right, calls))
            close(here, self.result, call.result, right, hint=told, slack=self.slack, scale=terms)
            if call.beside:
                raise Wrong(f"{here}: memory next to the tensor was overwritten.")
            unchanged(here, call.changed)
            for name in never_waited(call.notes):
                raise Wrong(
                    f"{here}: an {name} is never waited on. When may its tensor be used again?"
                )
        if self.messages:
            self.messages(where, case, calls)
        if self.same_bits:
            same_bits(where, self.result, [call.result for call in calls])

    def _told(self, seen: Seen) -> str:
        """The symptom of a wrong result."""
        if not isinstance(seen.result, torch.Tensor) or seen.result.shape != seen.right.shape:
            return ""
        return told(self.symptoms, seen)


def largest(arguments: Any) -> float:
    """The largest magnitude of the finite values in tensors."""
    found = [x.detach().double().abs() for x in tensors_in(arguments) if x.is_floating_point()]
    return max((x[x.isfinite()].max().item() for x in found if x.isfinite().any()), default=0.0)


def wider(call: Call) -> str:
    """A question if messages have a wider type than the result; otherwise empty."""
    sent = {note.dtype for note in call.notes if note.name == "isend"}
    wide = [str(dtype) for dtype in sent if dtype.itemsize > call.result.dtype.itemsize]
    names = " and ".join(wide)
    return f"\nMessages are {names} for a tensor of {call.result.dtype}: why?" if wide else ""


# ---- on a rank


def observed(answer: Any, job: tuple, case: Any) -> list[Call]:
    """Each call of the function, and what it did."""
    name, inputs, in_place = job
    rank, size, calls, looks = dist.get_rank(), dist.get_world_size(), [], []
    for number in range(case.calls):
        given = inputs(case, rank, size, number)
        arguments = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
        edge = around = None
        if in_place is not None:  # place it in the middle of a larger tensor
            mine = given[in_place]
            edge = fractions(number, EDGE, dtype=mine.dtype)
            around = torch.cat([edge, mine.reshape(-1), edge])
            arguments[in_place] = around[EDGE : EDGE + mine.numel()].view(mine.shape)
        others = {name_of(answer, name, i): x for i, x in enumerate(arguments) if i != in_place}
        with Look(**others) as look, noted() as notes:
            result = getattr(answer, name)(*arguments)
        if in_place is not None:
            found = around.clone()
            beside = not all(part.equal(edge) for part in (found[:EDGE], found[-EDGE:]))
            result = found[EDGE : EDGE + mine.numel()].view(mine.shape)
        else:
            beside, found = False, None
        changed = look.changed()
        del around, arguments, others, found
        calls.append([given, result, beside, changed, notes, look.events])
        looks.append(look)
        del given, result, notes, look
    held, done = 0, []
    for call, look in zip(calls, looks):
        held += look.kept(call[1]) if case.calls > 1 else 0
        done.append(Call(*call, held))
    return done


def name_of(answer: Any, function: str, number: int) -> str:
    """The answer's name for an argument."""
    code = getattr(answer, function).__code__
    return code.co_varnames[number] if number < code.co_argcount else f"argument {number}"
