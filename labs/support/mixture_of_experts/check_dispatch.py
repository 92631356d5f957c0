"""Given: what the check cells look at: values, gradients, messages and bytes.

1 to 4 real ranks call your functions with loads as uneven as they come (scenarios.py): a rank
without a token, a rank to whose experts nobody wants, an expert without rows. What arrives, what
comes back and all gradients must be those of one rank, and no byte too many may travel.
"""

from pathlib import Path

import torch

from labs.support.mixture_of_experts.scenarios import CASES, exchange, send_out, there_and_back
from utils.course.checks import Wrong, on_ranks

RANKS = (1, 2, 3, 4)
HANG = "Do all ranks call the same all-to-alls, also a rank that has nothing to send?"


def _on_all_sizes(path: Path, scenario, first=None):
    """Yields (size, rank, number of the case, what the rank found); `first(result, case)` judges
    something of all of them before."""
    for size in RANKS:
        results = on_ranks(size, path, scenario, hang=HANG)
        for rank, result in enumerate(results):
            for number, found in enumerate(result if first else ()):
                first(found, _case(size, rank, number))
        for number in range(len(results[0])):
            for rank, result in enumerate(results):
                yield size, rank, number, result[number]


def _case(size: int, rank: int, number: int) -> str:
    return f"with {size} rank{'s' * (size > 1)}, rank {rank}, {CASES[number].name}"


# ---- exercise a


def all_to_all(path: Path) -> str:
    """Judges `AllToAll` in the file."""
    for size, rank, _, result in _on_all_sizes(path, exchange):
        case = f"with {size} rank{'s' * (size > 1)}, rank {rank}"
        _right_rows(result, case)
        for direction in ("forward", "backward"):
            if size > 1:
                _one_message(result[direction], result["bytes"][direction], f"{case}, {direction}")
        _right_gradient(result, case)
    return (
        "every row arrives, on 1, 2, 3 and 4 ranks, with a rank that sends or gets nothing;\n"
        "gradients come back to the rows that they belong to;\n"
        "one message in each direction, and not a byte too many."
    )


def _right_rows(result: dict, case: str) -> None:
    arrived, expected = result["arrived"], result["expected"]
    if arrived.shape != expected.shape:
        raise Wrong(
            f"{case}: forward returns the shape {tuple(arrived.shape)}, not "
            f"{tuple(expected.shape)}:\nsum(receive) rows arrive."
        )
    if not torch.equal(arrived, expected):
        raise Wrong(
            f"{case}: other rows arrive than were sent here.\n"
            "send[d] rows go to rank d, receive[r] come from rank r."
        )


def _right_gradient(result: dict, case: str) -> None:
    if result["gradient"] is None:
        raise Wrong(f"{case}: no gradient comes back to the rows. What does backward return?")
    for name, words in (
        ("gradient", "is not that of the rows that it belongs to"),
        ("of a sum", "is not all ones after rows.sum()"),
    ):
        if not torch.equal(result[name], result["expected " + name]):
            raise Wrong(
                f"{case}: the gradient that comes back {words}.\n"
                "A row came from rank r: its gradient goes back there. What was received is sent."
            )


def _one_message(events: list, expected: int, case: str) -> None:
    names = [op for op, _ in events]
    if names != ["all_to_all"]:
        raise Wrong(
            f"{case}: {', '.join(names) or 'no message at all'}, where one all-to-all would do."
        )
    if events[0][1] != expected:
        raise Wrong(
            f"{case}: this rank sends {events[0][1]:,} bytes to others, and its rows for them are "
            f"{expected:,}.\nNothing needs filling up: an all-to-all takes a size for every rank."
        )


# ---- exercise b


def dispatching(path: Path) -> str:
    """Judges `tell` and `dispatch` in the file."""
    for size, rank, number, result in _on_all_sizes(path, send_out, _right_counts):
        case = _case(size, rank, number)
        _right_loads(result, case)
        _right_order(result, size, case)
        if size > 1:
            extra = result["for counts"]
            _no_byte_too_many(result["forward"], result["bytes"], 2, f"{case}: dispatch", extra)
        if result["gradient"] is None or not torch.allclose(
            result["gradient"], result["expected gradient"]
        ):
            raise Wrong(
                f"{case}: the gradient of the tokens is wrong.\n"
                "Rows must travel through AllToAll.apply, and a token has one row for each choice."
            )
    return (
        "every row is at its expert, on 1, 2, 3 and 4 ranks, also from a rank without tokens\n"
        "and with experts that nobody wants;\n"
        "two messages, the counts and the rows, and not a byte too many."
    )


def _right_counts(result: dict, case: str) -> None:
    told, expected = result["told"], result["should"]
    if not isinstance(told, torch.Tensor) or told.shape != expected.shape:
        shape = tuple(getattr(told, "shape", ()))
        raise Wrong(
            f"{case}: tell returns the shape {shape}, not {tuple(expected.shape)}: (N, E/N)."
        )
    if not torch.equal(told, expected):
        hint = "Row r is what rank r has for each expert of this rank: from every rank its part."
        if torch.equal(told.flatten(), result["counts"]):
            hint = "These are this rank's own counts: who tells it the others'?"
        raise Wrong(f"{case}: tell returns {told.tolist()}, not {expected.tolist()}.\n{hint}")


def _right_loads(result: dict, case: str) -> None:
    loads = result["loads"]
    loads = loads.tolist() if isinstance(loads, torch.Tensor) else loads
    if loads == result["expected loads"]:
        return
    hint = "Add up what all ranks have for each expert of this rank."
    if loads == result["own loads"]:
        hint = "These are this rank's own tokens only: tell() must bring the others' counts."
    raise Wrong(f"{case}: way.loads is {loads}, not {result['expected loads']}.\n{hint}")


def _right_order(result: dict, size: int, case: str) -> None:
    rows, loads = result["rows"], result["expected loads"]
    if rows.shape != (sum(loads), result["width"]):
        raise Wrong(
            f"{case}: rows has the shape {tuple(rows.shape)}, not {(sum(loads), result['width'])}:"
            "\none row for each choice of an expert of this rank."
        )
    for index, part in enumerate(rows.split(loads)):
        if _sorted(part) == _sorted(result["expected rows"][index]):
            continue
        hint = "Whose tokens are they? A row is tokens[place // k]."
        if size > 1 and _sorted(rows) == _sorted(torch.cat(result["expected rows"])):
            hint = "The right rows are here, but not expert by expert: they came rank by rank."
        raise Wrong(f"{case}: expert {index} of this rank gets rows of other tokens.\n{hint}")


def _sorted(rows: torch.Tensor) -> list:
    return sorted(tuple(row) for row in rows.tolist())


def _no_byte_too_many(events: list, rows: int, messages: int, case: str, counts: int = 0) -> None:
    """`rows` bytes of rows may go to other ranks in so many messages, and some for the counts."""
    names = ", ".join(op for op, _ in events) or "no message"
    sent = sum(size for _, size in events)
    if sent > rows + counts:
        raise Wrong(
            f"{case} sends {sent:,} bytes to others ({names}); the rows for them are {rows:,} "
            "bytes.\nEach row goes to one rank only, and nothing needs filling up."
        )
    if len(events) != messages:
        raise Wrong(f"{case} makes {len(events)} messages ({names}); {messages} would do.")


# ---- exercise c


def combining(path: Path) -> str:
    """Judges `combine` in the file, and with it the whole layer."""
    for size, rank, number, result in _on_all_sizes(path, there_and_back):
        case = _case(size, rank, number)
        _right_outputs(result, case)
        if size > 1:
            _no_byte_too_many(result["combine"], result["bytes"], 1, f"{case}: combine")
        for name, hint in (
            ("weights", "Does the router get a gradient? Weigh the results with `weights` itself."),
            ("tokens", "Rows must travel through AllToAll.apply on both ways."),
            ("experts", "An expert's gradient is the sum over the tokens of all ranks."),
        ):
            ours, right = result["gradients"][name], result["expected"][name]
            if ours is None or not torch.allclose(ours, right, rtol=1e-8, atol=1e-10):
                raise Wrong(f"{case}: the gradient of the {name} is not one rank's.\n{hint}")
        if size > 1:
            both = result["there and back"]
            _no_byte_too_many(result["backward"], both, 2, f"{case}: backward")
    return (
        "outputs and gradients equal one rank's on 1, 2, 3 and 4 ranks;\n"
        "each result travels once, back to its token, and so does each gradient."
    )


def _right_outputs(result: dict, case: str) -> None:
    y, right = result["y"], result["expected"]["y"]
    if y.shape != right.shape:
        raise Wrong(
            f"{case}: combine returns the shape {tuple(y.shape)}, not {tuple(right.shape)}."
        )
    if torch.allclose(y, right, rtol=1e-8, atol=1e-10):
        return
    hint = "Undo the steps of dispatch, the last one first: each sorting has an inverse, argsort()."
    if torch.allclose(y, result["expected"]["sum"]):
        hint = "This is the plain sum of the results: weigh each with its weight."
    elif torch.allclose(y, result["expected"]["sum"] / result["choices"]):
        hint = "This is the mean of the results: weigh each with its weight."
    elif torch.allclose(y.sum(dim=0), right.sum(dim=0)):
        hint = "These are the right numbers at other tokens: way.order says whose each row is."
    raise Wrong(f"{case}: the layer's outputs are not one rank's.\n{hint}")
