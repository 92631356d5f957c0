"""Given: what the check cells look at: values, bytes and messages, and memory.

1, 2, 3 and 4 real ranks train a small network with your class (scenarios.py); the parameters must
equal those of one rank after every step. `utils.measure.traffic` counts what is sent, and the
memory of all tensors that Python can reach is added up.
"""

from pathlib import Path

import torch

from labs.support.sharded_data_parallel.scenarios import BACKWARDS, train, weigh
from utils.course.checks import Wrong, on_ranks

RANKS = (1, 2, 3, 4)
VOLUME = {"Zero1": 2, "Zero2": 2, "Zero3": 3}  # times the parameters' bytes · (N−1)/N
KEPT = {
    "Zero1": "parameters + gradients + optimizer state/N",
    "Zero2": "parameters + (gradients + optimizer state)/N",
    "Zero3": "(parameters + gradients + optimizer state)/N, and one unit",
}


def zero1(path: Path) -> str:
    """Judges `Zero1` in the file."""
    return _judge(path, "Zero1")


def zero2(path: Path) -> str:
    """Judges `Zero2` in the file."""
    return _judge(path, "Zero2")


def zero3(path: Path) -> str:
    """Judges `Zero3` in the file."""
    return _judge(path, "Zero3")


def _judge(path: Path, stage: str) -> str:
    for size in RANKS:
        ranks = on_ranks(size, path, train, stage)
        for rank, result in enumerate(ranks):
            case = f"with {size} rank{'s' * (size > 1)}, rank {rank}"
            _right_shards(result, stage, case)
            _right_values(result, ranks[(rank + 1) % size], size, case)
            _right_traffic(result, size, stage, case)
    for rank, result in enumerate(on_ranks(2, path, weigh, stage)):
        _right_memory(result, stage, f"with 2 ranks, rank {rank}")
    return (
        "parameters equal one rank's on 1, 2, 3 and 4 ranks, three steps in a row;\n"
        f"each rank sends {VOLUME[stage]} times the parameters · (N−1)/N in a step;\n"
        f"memory: {KEPT[stage]}."
    )


def _right_shards(result: dict, stage: str, case: str) -> None:
    for shape, length in zip(result["shards"], result["lengths"]):
        if shape != (length,):
            raise Wrong(
                f"{case}: own_part has the shape {shape}, and a part is ({length},).\n"
                "unit.parts() lists the parts by rank."
            )
    if stage == "Zero3" and not all(result["copies"]):
        raise Wrong(
            f"{case}: own_part lies in the memory of unit.flat, which is released.\n"
            "It needs memory of its own: a copy."
        )
    if stage != "Zero3" and any(result["copies"]):
        raise Wrong(
            f"{case}: own_part is a copy. The optimizer would change it, and unit.flat would keep "
            "the old values\n(and there would be a second set of parameters): return a view."
        )


def _right_values(result: dict, neighbour: dict, size: int, case: str) -> None:
    for number, step in enumerate(result["steps"]):
        before, expected = result["alone"][number : number + 2]
        where = f"{case}: after step {number + 1}"
        if number == 2:
            where += " (two backward passes)"
        for index, (now, then, right) in enumerate(zip(step["now"], before, expected)):
            if _close(now, right):
                continue
            theirs = neighbour["steps"][number]["now"][index]
            hint = _symptom(number, now, then, right, theirs, size)
            raise Wrong(f"{where}, the parameters of unit {index} differ from one rank's.\n{hint}")


def _close(tensors, others) -> bool:
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(tensors, others))


def _symptom(number: int, now, before, right, theirs, size: int) -> str:
    if any(tensor.isnan().any() for tensor in now):
        return "They are NaN: memory was allocated and not filled."
    if _close(now, before):
        return "They did not change: does the optimizer find a gradient in every shard?"
    many = [b + size * (r - b) for b, r in zip(before, right)]
    if number == 0 and _close(now, many):
        return f"The step is {size} times too large: a sum over the ranks, not their mean."
    if not _close(now, theirs):
        return "They differ from the next rank's too: does every rank get every other rank's part?"
    if number == 1:
        return "Step 1 was right: are the gradients of a step forgotten when it is done?"
    if number == 2:
        return (
            "Steps 1 and 2 were right: the gradients of several backward passes must add up,\n"
            "and none must count twice."
        )
    return "Is part r of the mean gradient on rank r, and is it the mean over all ranks?"


def _right_traffic(result: dict, size: int, stage: str, case: str) -> None:
    value = 8  # bytes of a float64
    whole = sum(result["lengths"]) * size * value
    one = (size - 1) * whole // size  # a gather or a reduce-scatter of all parameters
    for number, (step, backwards) in enumerate(zip(result["steps"], BACKWARDS)):
        rounds = {"Zero1": 2, "Zero2": backwards + 1, "Zero3": 3 * backwards}[stage]
        where = f"{case}: in step {number + 1}"
        if backwards > 1:
            where += f" ({backwards} backward passes)"
        sent = step["sent"]
        if sent > rounds * one:
            does = ", ".join(step["ops"]) or "nothing"
            raise Wrong(
                f"{where} this rank sends {sent / one if one else sent:.3g} times the "
                f"parameters · (N−1)/N, not {rounds}.\n"
                f"It calls: {does}. Who needs what, and how often?"
            )
        units = len(result["lengths"])
        if size > 1 and step["calls"] > rounds * units:
            raise Wrong(
                f"{where} there are {step['calls']} messages for {units} units: the right bytes "
                "in too many pieces.\nA unit's parameters travel together, in one collective."
            )
        if stage == "Zero3" and step["in_step"]:
            raise Wrong(f"{where}, step() communicates: the next forward pass gathers anyway.")


def _right_memory(result: dict, stage: str, case: str) -> None:
    padded, unit, size = sum(result["padded"]), max(result["padded"]), 2
    if result["stale"]:
        raise Wrong(
            f"{case}: after step() unit.shard.grad still holds {result['stale']:,} bytes of "
            "gradients.\nNobody needs them any more: self.optimizer.zero_grad()."
        )
    if stage != "Zero1" and result["gradients"] > unit:
        raise Wrong(
            f"{case}: during the backward pass there are {result['gradients']:,} bytes of whole "
            f"gradients;\nthe largest unit has {unit:,}. Forget them as soon as they are reduced."
        )
    if stage == "Zero3":
        _only_one_unit_whole(result["flats"], unit, case)
    weights = padded // size if stage == "Zero3" else padded
    state = 2 * padded // size  # AdamW's two averages
    gradients = {"Zero1": sum(result["sizes"])}.get(stage, padded // size)
    for moment, expected in (
        ("after the backward pass", weights + state + gradients),
        ("after the step", weights + state),
    ):
        if result[moment] > 1.1 * expected:  # the activations, and single numbers
            raise Wrong(
                f"{case}: {moment} {result[moment]:,} bytes of tensors are alive, and "
                f"{expected:,} would do.\n"
                "What is kept that nobody needs any more?"
            )


def _only_one_unit_whole(flats: list[tuple[str, int]], unit: int, case: str) -> None:
    """Names the first moment at which there is more than there should be."""
    advice = {
        "between": "after a forward pass: give its memory back",
        "forward": "in the forward pass: one computes, the others must be released",
        "backward": "in the backward pass: one computes, the others must be released",
    }
    for moment, size in flats:
        if size > (0 if moment == "between" else unit):
            words = f"{size / unit:.0f} unit(s) of whole parameters are in memory {advice[moment]}"
            raise Wrong(f"{case}: {words}.")
