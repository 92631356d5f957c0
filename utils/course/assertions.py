"""What a check expects of an answer, and the sentence that says what it found instead.

Each function returns nothing if the answer keeps its contract; otherwise it raises `Wrong` with
the case, the finding, and a question to ask. A cause is named only if it is certain.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from utils.measure.traffic import Event

WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
SLACK = 64  # roundings by which a result may differ from the reference
# for `forbid`: libraries of parallel layers
PARALLEL = ("utils.parallel", "distributed.tensor", "dist.tensor", "DTensor")


class Wrong(Exception):
    """An answer is wrong. The message names the symptom and where to look."""


class NotHere(Exception):
    """This machine cannot run what a check needs. The message says what is missing, and where to
    find it."""


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
    """`got` is a tensor of right's shape, with right's values up to rounding.

    right: the reference, preferably in float64; slack: how many roundings of got's dtype, each of
    the largest value in `right`, a value may differ; integers must be equal. scale: the size of
    the terms, if `right` is a sum in which large ones may cancel. dtype: the one `got` must have.
    A NaN or an infinity must be where the reference has one.
    """
    if not isinstance(got, torch.Tensor):
        raise Wrong(f"{case}: {what} is {described(got)}, not a tensor.")
    if got.shape != right.shape:
        raise Wrong(
            f"{case}: {what} has the shape {tuple(got.shape)}, but should have "
            f"{tuple(right.shape)}." + _line(hint)
        )
    if dtype is not None and got.dtype != dtype:
        raise Wrong(f"{case}: {what} is {got.dtype}, but should be {dtype}." + _line(hint))
    got, rounding = got.detach(), 0.0
    if got.is_floating_point():
        rounding = torch.finfo(got.dtype).eps
    right = right.detach()
    same = (got == right) | (got.isnan() & right.isnan())  # a double cannot hold every int64
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
            hint = "A NaN in the input must stay NaN: where do you lose it?"
        away, coarse = (mine - right)[bad].abs().max().item(), 2**-23 * scale
        several = 2 * bad.sum() >= bad.numel()
        if got.dtype == torch.float64 and several and coarse / 64 <= away <= coarse:
            hint = "Correct only to float32 precision: do you convert anywhere?"
        raise Wrong(
            f"{case}: {what}{where} is {seen}, but should be {wanted}"
            f" ({int(bad.sum()):,} of {bad.numel():,} values differ)." + _line(hint)
        )


def a_number(case: str, what: str, value: Any) -> float:
    """The value of a number of any kind: Python's, NumPy's, a tensor with one element."""
    try:
        if isinstance(value, str | bytes):  # a text of digits is not a number
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"{case}: {what} is {described(value)}, but should be a number.") from None


def same_bits(case: str, what: str, by_rank: Sequence[torch.Tensor], hint: str = "") -> None:
    """All ranks hold the same bits."""
    for rank, tensor in enumerate(by_rank):
        if not bitwise_equal(tensor, by_rank[0]):
            raise Wrong(
                f"{case}: rank {rank} and rank 0 do not hold the same bits of {what}." + _line(hint)
            )


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and bits are equal: NaN equals NaN, and 0 is not −0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.detach().view(WHOLE[t.dtype.itemsize]) for t in (a, b)))


def communication(
    case: str, events: Iterable[Event], right: dict[str, Sequence[int]], hint: str = ""
) -> None:
    """A rank starts these operations and no others.

    events: `Traffic.events` of the rank, or some of them; right: {operation: payload of each of its
    calls in bytes}, in any order; operations have the names of `utils.measure.traffic`.
    """
    seen = {}
    for event in events:
        seen.setdefault(event.op, []).append(event.payload)
    right = {op: list(calls) for op, calls in right.items() if calls}
    if {op: sorted(calls) for op, calls in seen.items()} != {
        op: sorted(calls) for op, calls in right.items()
    }:
        raise Wrong(
            f"{case}: this rank calls {_calls(seen)}, but should call {_calls(right)}."
            + _line(hint)
        )


def unchanged(case: str, changed: Iterable[str], hint: str = "") -> None:
    """No input was changed. changed: the names that `Look.changed` returned."""
    for name in changed:
        raise Wrong(
            f"{case}: {name} is not what it was before the call, but its owner still needs it."
            + _line(hint)
        )


def nothing_kept(case: str, held: int, hint: str = "") -> None:
    """No bytes that the answer allocated are still held. held: as returned by `Look.kept`."""
    if held:
        raise Wrong(
            f"{case}: at the end, {held:,} bytes that it allocated are still held.\n"
            + (hint or "What holds them, and why?")
        )


def own_size(case: str, spare: int, allowed: int = 0) -> None:
    """Results are not views of larger tensors. spare: as returned by `Look.spare`."""
    if spare > allowed:
        raise Wrong(
            f"{case}: a result or a gradient is a view of a larger tensor and keeps {spare:,} more "
            "bytes\nin memory. Does anything need them?"
        )


def alike(got: Any, right: torch.Tensor, slack: float = 8) -> bool:
    """Whether `got` has these values, within `slack` roundings of the largest, and NaN where they
    have it: for symptoms."""
    if not isinstance(got, torch.Tensor) or got.shape != right.shape or not got.numel():
        return False
    if not got.is_floating_point():
        return torch.equal(got.double(), right.double())
    scale = right.double().abs().nan_to_num(0.0, posinf=0.0).max().item()
    away = slack * torch.finfo(got.dtype).eps * scale
    return torch.allclose(got.double(), right.double(), rtol=0.0, atol=away, equal_nan=True)


def told(symptoms: Iterable[tuple[Callable, Any]], seen: Any) -> str:
    """The words of the first symptom (test, words) whose test holds; words: a string, or a function
    of `seen`."""
    words = next((words for test, words in symptoms if test(seen)), "")
    return words if isinstance(words, str) else words(seen)


def number(value: torch.Tensor | float) -> str:
    """A number with six digits."""
    return f"{float(value):.6g}"


def told_apart(*values: torch.Tensor | float) -> list[str]:
    """Numbers with six digits, or with as many as it takes to see that they differ."""
    short = [number(value) for value in values]
    whole = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    if len(set(short)) > 1:
        return short
    return [f"{value:.17g}" if isinstance(value, float) else str(value) for value in whole]


def forbid(path: Path, library: Iterable[str]) -> None:
    """The file at `path` does not use the library that the exercise replaces.

    library: forbidden names of modules, classes and functions, possibly dotted; any part of a name
    in the file may match. Imports, names, attributes and strings are searched, except docstrings
    and imports of `labs.`, which are the lab's own.
    """
    for name, line in _names(ast.parse(path.read_text(encoding="utf-8"))):
        for known in library:
            if f".{known}." in f".{name}.":
                raise Wrong(
                    f"{path.name} line {line} uses {known}: that is the library, but this exercise "
                    "is to be done by hand."
                )


def described(value: Any) -> str:
    """A short description of a value of the wrong type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({type(value).__name__})"


def _names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of everything that a file names, dotted as in the file."""
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
