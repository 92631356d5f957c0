"""Given: what the checks of all three chapters have in common: the layers, the loss, the sequence.

1 to 6 real ranks run your functions and layers (scenarios.py); everything must equal the whole
layer in float64.
"""

import torch

from utils.course.assertions import Wrong, communication
from utils.course.runner import Group, Trial

HANG = "Does every rank call the same collectives, in the same order?"
ASKED = "without gradients"
HALVES = {"forward": "forward", "backward": "backward", "asking": f"forward {ASKED}"}
NUMBERS = 64  # bytes that a function of autograd may keep as tensors: lengths
TYPES = (torch.float64, torch.float32, torch.bfloat16)
# what the exercises build, in the course's own files and in torch's
LIBRARY = ("utils.parallel", "torch.distributed.tensor", "dist.tensor", "DTensor")


def numbers(trial: Trial, shapes: list, i: int, odd: tuple[int, str]) -> dict:
    """What `scenarios.tensor_of` makes tensors of. i: of three cases the first is transposed on
    every other rank, the second in plain memory, and in the third each rank has a layout of its
    own."""
    size, first = len(shapes), trial.draw.randrange(2)
    layouts = [
        [("transposed", "plain")[(rank + first) % 2] for rank in range(size)],
        ["plain"] * size,
        trial.draw.choices(("plain", "transposed", "expanded", "a slice"), k=size),
    ][i]
    return {"shapes": shapes, "seed": trial.new_seed(), "layouts": layouts, "odd": odd}


def runs(group: Group, cases: list[dict]) -> list[tuple[list[dict], bool]]:
    """(cases, whether results come late) of each run: before a second run, one rank has loaded the
    answer afresh. Late are the first two cases."""
    half = len(cases) // 2
    late = [(cases[:2], True)] * (group.size == 2)
    return [(cases[:half], False), (cases[half:], False)] + late


def words_of(group: Group, case: dict, rank: int | None, late: bool) -> str:
    """The case in words."""
    given = case["x"]
    shape = given["shapes"][rank or 0]
    layout = given["layouts"][rank or 0]
    layout = "" if layout == "plain" else f" ({layout})"
    words = f"x of shape {shape} in {name_of(case['dtype'])}{layout}"
    if given["odd"][1] and rank == given["odd"][0]:
        words += f" with {given['odd'][1]} on this rank"
    elif given["odd"][1]:
        words += f" with {given['odd'][1]} on rank {given['odd'][0]}"
    words += ", results coming late" * late
    return group.case(words) + ("" if rank is None else f", rank {rank}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sum_hint(got, total: torch.Tensor, own: list[torch.Tensor], rank: int) -> str:
    """A question about a sum that is none, with a cause where the numbers show it."""
    size = len(own)
    if equal(got, own[rank].double()):
        return "It is this rank's own. All ranks take part: their numbers add up."
    if size > 1 and equal(got, total / size):
        return "It is the mean over the ranks. Every rank counts in full: a sum."
    if size > 1 and equal(got, total * size):
        return f"It is {size} times the sum."
    return "It must be the sum over the ranks. Is the result there before it is used?"


def slack_of(roundings: int, summands: list[torch.Tensor], total: torch.Tensor) -> float:
    """So many roundings of the largest summand, as `close` counts: in those of the total."""
    sizes = [t.double().nan_to_num().abs().max().item() for t in (*summands, total) if t.numel()]
    largest = sizes[-1] if total.numel() else 0
    return roundings * max(1.0, max(sizes) / largest) if largest else roundings


def equal(got, right: torch.Tensor) -> bool:
    """Up to rounding; never where a NaN stands."""
    if not isinstance(got, torch.Tensor) or got.shape != right.shape or not got.numel():
        return False
    scale = right.abs().max().item()
    return bool((got.double() - right).abs().max() <= 8 * torch.finfo(got.dtype).eps * scale)


def no_messages(where: str, events: list, size: int) -> None:
    messages(where, events, {}, size)


def messages(where: str, events: list, right: dict, size: int, hint: str = "") -> None:
    """The operations of `communication`; one rank need not speak to itself."""
    if events or size > 1:
        communication(where, events, right, hint)


def nothing_kept(where: str, kept: int) -> None:
    if kept:
        raise Wrong(
            f"{where}: when the step is over, {kept:,} bytes that it made are still held.\n"
            "Who remembers them, and what for?"
        )


def own_size(where: str, spare: int, allowed: int = 0) -> None:
    if spare > allowed:
        raise Wrong(
            f"{where}: a result or a gradient is a part of a larger tensor, of which {spare:,} "
            "bytes stay\nin memory with it. Who needs the rest?"
        )


def no_tensor_held(where: str, held: int) -> None:
    if held > NUMBERS:
        raise Wrong(
            f"{where}: tensors of {held:,} bytes are kept for the backward pass.\n"
            "What of them does it need?"
        )
