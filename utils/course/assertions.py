"""What a check expects of an answer, and the sentence that says what it found instead.

Each function returns nothing where the answer keeps to its contract, and raises `Wrong` where it
does not: the case, what was seen, and a question to ask. A cause is named only where it is
established.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from utils.measure.traffic import Event

WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
SLACK = 64  # roundings that a result may be away from the reference
# for `forbid`: libraries of parallel layers
PARALLEL = ("utils.parallel", "distributed.tensor", "dist.tensor", "DTensor")


class Wrong(Exception):
    """An answer is wrong. The message names the symptom and where to look."""


class NotHere(Exception):
    """This machine cannot run what a check needs. The message says what is missing, and where it
    would be found."""


def close(
    case: str,
    what: str,
    got: Any,
    right: torch.Tensor,
    *,
    hint: str = "",
    dtype: torch.dtype | None = None,
    slack: float = SLACK,
    scale: float = 0.0,
) -> None:
    """`got` is a tensor of right's shape, and its numbers are right's, up to rounding.

    right: the reference, best in float64; slack: how many roundings of got's dtype, each of the
    largest number in `right`, a number may be away from it; whole numbers must be equal. scale:
    of the terms, where `right` is a sum in which large ones may cancel. dtype: what `got` must
    have. A NaN or an infinity must stand where the reference has it.
    """
    if not isinstance(got, torch.Tensor):
        raise Wrong(f"{case}: {what} is {described(got)}, not a tensor.")
    if got.shape != right.shape:
        raise Wrong(
            f"{case}: {what} has the shape {tuple(got.shape)}, and {tuple(right.shape)} is right."
            + _line(hint)
        )
    if dtype is not None and got.dtype != dtype:
        raise Wrong(f"{case}: {what} is {got.dtype}, and {dtype} is right." + _line(hint))
    got, rounding = got.detach(), 0.0
    if got.is_floating_point():
        rounding = torch.finfo(got.dtype).eps
    right = right.detach()
    same = (got == right) | (got.isnan() & right.isnan())  # a double has no 64 bits for a number
    values, mine, right = (got, right), got.double(), right.double()
    finite = right.isfinite()
    scale = max(scale, right[finite].abs().max().item() if finite.any() else 0.0)
    near = (mine - right).abs() < slack * rounding * scale
    bad = ~(same | (finite & near))
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        where = f" at {list(place)}" if place else ""
        seen, wanted = told_apart(*(value[place] for value in values))
        if right[bad].isnan().all():
            hint = "A NaN that goes in comes out: where does it become something else?"
        away, coarse = (mine - right)[bad].abs().max().item(), 2**-23 * scale
        several = 2 * bad.sum() >= bad.numel()
        if got.dtype == torch.float64 and several and coarse / 64 <= away <= coarse:
            hint = "The digits that a float32 has are right: does it go through one anywhere?"
        raise Wrong(
            f"{case}: {what}{where} is {seen}, and {wanted} is right"
            f" ({int(bad.sum()):,} of {bad.numel():,} numbers differ)." + _line(hint)
        )


def a_number(case: str, what: str, value: Any) -> float:
    """The value of whatever kind of number it is: Python's, NumPy's, a tensor of one number."""
    try:
        if isinstance(value, str | bytes):  # digits are no number
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"{case}: {what} is {described(value)}, and should be a number.") from None


def same_bits(case: str, what: str, by_rank: Sequence[torch.Tensor], hint: str = "") -> None:
    """All ranks hold the same bits."""
    for rank, tensor in enumerate(by_rank):
        if not bitwise_equal(tensor, by_rank[0]):
            raise Wrong(
                f"{case}: rank {rank} and rank 0 do not hold the same bits of {what}." + _line(hint)
            )


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same shape, dtype and bits: NaN equals NaN, and 0 is not −0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.detach().view(WHOLE[t.dtype.itemsize]) for t in (a, b)))


def communication(
    case: str, events: Iterable[Event], right: dict[str, Sequence[int]], hint: str = ""
) -> None:
    """A rank starts these operations and no other.

    events: `Traffic.events` of the rank, or a part of them; right: {operation: bytes handed over in
    each of its calls}, in any order; operations are called as in `utils.measure.traffic`.
    """
    seen = {}
    for event in events:
        seen.setdefault(event.op, []).append(event.payload)
    right = {op: list(calls) for op, calls in right.items() if calls}
    if {op: sorted(calls) for op, calls in seen.items()} != {
        op: sorted(calls) for op, calls in right.items()
    }:
        raise Wrong(
            f"{case}: this rank calls {_calls(seen)}, and {_calls(right)} will do." + _line(hint)
        )


def unchanged(case: str, changed: Iterable[str], hint: str = "") -> None:
    """No input was changed. changed: the names that `Look.changed` has found."""
    for name in changed:
        raise Wrong(
            f"{case}: {name} is not what it was before the call, and its owner still needs it."
            + _line(hint)
        )


def nothing_kept(case: str, held: int, hint: str = "") -> None:
    """No bytes of what the answer has made are held. held: as `Look.kept` has found."""
    if held:
        raise Wrong(
            f"{case}: when all is over, {held:,} bytes that it made are still held.\n"
            + (hint or "Who remembers them, and what for?")
        )


def own_size(case: str, spare: int, allowed: int = 0) -> None:
    """Results are not parts of larger tensors. spare: as `Look.spare` has found."""
    if spare > allowed:
        raise Wrong(
            f"{case}: a result or a gradient is a part of a larger tensor, of which {spare:,} "
            "bytes stay\nin memory with it. Who needs the rest?"
        )


def alike(got: Any, right: torch.Tensor, slack: float = 8) -> bool:
    """Whether `got` are these numbers, at most `slack` roundings of the largest away, and NaN where
    these are: for symptoms."""
    if not isinstance(got, torch.Tensor) or got.shape != right.shape or not got.numel():
        return False
    if not got.is_floating_point():
        return torch.equal(got.double(), right.double())
    scale = right.double().abs().nan_to_num(0.0, posinf=0.0).max().item()
    away = slack * torch.finfo(got.dtype).eps * scale
    return torch.allclose(got.double(), right.double(), rtol=0.0, atol=away, equal_nan=True)


def told(symptoms: Iterable[tuple[Callable, Any]], seen: Any) -> str:
    """The words of the first symptom (test, words) whose test holds; words: a string, or a function
    of what is seen."""
    words = next((words for test, words in symptoms if test(seen)), "")
    return words if isinstance(words, str) else words(seen)


def number(value: torch.Tensor | float) -> str:
    """A number in six digits."""
    return f"{float(value):.6g}"


def told_apart(*values: torch.Tensor | float) -> list[str]:
    """Numbers in six digits, or in as many as show that they differ."""
    short = [number(value) for value in values]
    whole = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    if len(set(short)) > 1:
        return short
    return [f"{value:.17g}" if isinstance(value, float) else str(value) for value in whole]


def forbid(path: Path, library: Iterable[str]) -> None:
    """The file at `path` does not use what the exercise is to build by hand.

    library: names of modules, classes and functions, also dotted ones, of which any part of a name
    in the file may be one. Seen are imports, names, attributes and strings that are no docstrings;
    imports of `labs.` are the lab's own.
    """
    for name, line in _names(ast.parse(path.read_text(encoding="utf-8"))):
        for known in library:
            if f".{known}." in f".{name}.":
                raise Wrong(
                    f"{path.name} line {line} uses {known}: that is the library, and this exercise "
                    "is to be done by hand."
                )


def described(value: Any) -> str:
    """A value that should have been another kind of thing, in a few words."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({type(value).__name__})"


def _names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of whatever a file names, dotted as it stands there."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Name | ast.Attribute):
            found = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value] if id(node) not in texts else []
        for name in found:
            if not name.startswith("labs."):
                yield name, node.lineno


def _calls(calls: dict[str, list[int]]) -> str:
    """{"all_reduce": [8, 8]} -> "all_reduce 2 times (8, 8 bytes)"."""
    listed = []
    for op, sizes in calls.items():
        shown = ", ".join(f"{size:,}" for size in sizes[:4]) + (" …" if len(sizes) > 4 else "")
        times = "once" if len(sizes) == 1 else f"{len(sizes)} times"
        listed.append(f"{op} {times} ({shown} bytes)")
    return " and ".join(listed) or "nothing"


def _line(hint: str) -> str:
    return f"\n{hint}" if hint else ""
