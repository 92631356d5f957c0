"""Given: what the check cells look at: values, gradients, messages and bytes, and memory.

1, 2 and 3 real ranks run your layer (scenarios.py) at sizes that N does not divide; everything
must equal the whole layer on one rank.
"""

import math
from pathlib import Path

import torch

from labs.support.tensor_parallel import scenarios
from utils.course.checks import Wrong, on_ranks

RANKS = (2, 3, 1)  # most mistakes show with two
HANG = "Does every rank call the same collectives, in the same order?"


def pair(path: Path) -> str:
    """Judges `Enter` and `Leave`."""
    for size in RANKS:
        for rank, seen in enumerate(on_ranks(size, path, scenarios.pair, hang=HANG)):
            where = f"with {size} rank{'s' * (size > 1)}, rank {rank}"
            _right_enter(seen["enter"], size, f"{where}: Enter")
            _right_leave(seen["leave"], size, f"{where}: Leave")
    return (
        "Enter: nothing forward, a sum backward; Leave: a sum forward, nothing backward;\n"
        "one all-reduce each, and neither changes the tensor that it was given."
    )


def _right_enter(seen: dict, size: int, name: str) -> None:
    if not torch.equal(seen["y"], seen["x"]) or seen["forward"]:
        raise Wrong(f"{name}.forward must hand x on as it is, and say nothing to the others.")
    _not_in_place(seen, name)
    right, got = seen["sum of dy"], seen["dx"]
    if not torch.allclose(got, right):
        if torch.allclose(got, seen["dy"]):
            hint = "It is this rank's own. All ranks used x: their gradients add up."
        elif torch.allclose(got * size, right):
            hint = "It is the mean over the ranks. Every rank's use of x counts in full: a sum."
        else:
            hint = "It must be the sum of dy over the ranks."
        raise Wrong(f"{name}.backward returns another gradient than one rank has.\n{hint}")
    if size > 1 and (seen["backward"] != 1 or seen["payload"] != right.numel() * 8):
        raise Wrong(f"{name}.backward makes {seen['backward']} messages; one all-reduce will do.")


def _right_leave(seen: dict, size: int, name: str) -> None:
    if not torch.allclose(seen["y"], seen["sum of x"]):
        own = torch.allclose(seen["y"], seen["x"])
        hint = "It is this rank's own part." if own else "Is it a sum, not a mean?"
        raise Wrong(f"{name}.forward does not return the sum of x over the ranks.\n{hint}")
    _not_in_place(seen, name)
    if not torch.allclose(seen["dx"], seen["dy"]):
        raise Wrong(
            f"{name}.backward changes the gradient, or adds it up over the ranks.\n"
            "Every rank holds the same sum y and the same loss of it: y grows by what x grows by."
        )
    if size > 1 and (seen["forward"] != 1 or seen["backward"]):
        raise Wrong(
            f"{name} makes {seen['forward']} messages forward and {seen['backward']} backward: "
            "one and none will do."
        )


def _not_in_place(seen: dict, name: str) -> None:
    for what in ("x", "dy"):
        if seen[f"{what} changed"]:
            raise Wrong(
                f"{name} changed the tensor {what} that it was given. Others may hold it too "
                "(a residual, another branch):\nall-reduce a clone."
            )


def mlp(path: Path) -> str:
    """Judges `column`, `row` and `ParallelMLP`."""
    _layer(path, "ParallelMLP", ("gate_proj", "up_proj", "down_proj"))
    return (
        "output, gradient of x and of every part equal the whole layer's on 1, 2 and 3 ranks;\n"
        "one all-reduce forward, one backward; each rank holds its part and no more."
    )


def attention(path: Path) -> str:
    """Judges `head_sizes` and `ParallelAttention`."""
    for size in RANKS:
        for rank, seen in enumerate(on_ranks(size, path, scenarios.sizes, hang=HANG)):
            where = f"with {size} rank{'s' * (size > 1)}, rank {rank}"
            if seen["got"] != seen["right"]:
                raise Wrong(
                    f"{where}: head_sizes({', '.join(map(str, seen['asked']))}) is "
                    f"{seen['got']}, not {seen['right']}.\nA rank has whole heads, and the query "
                    "heads that attend to its key-value heads."
                )
    _layer(path, "ParallelAttention", ("q_proj", "k_proj", "v_proj", "o_proj"))
    return (
        "6 query heads and 3 key-value heads on 1, 2 and 3 ranks: output and all gradients equal\n"
        "the whole layer's; one all-reduce forward, one backward; no head is cut."
    )


def _layer(path: Path, name: str, matrices: tuple[str, ...]) -> None:
    for size in RANKS:
        ranks = on_ranks(size, path, scenarios.layer, name, hang=HANG)
        cases = [f"with {size} rank{'s' * (size > 1)}, rank {rank}" for rank in range(size)]
        for case, seen in zip(cases, ranks):
            for matrix in matrices:
                _right_part(seen["parts"][matrix], f"{case}: {matrix}")
        for case, seen in zip(cases, ranks):
            _right_output(seen, size, case)
            _right_gradients(seen, size, case)
            _right_messages(seen, size, case)


def _right_part(part: dict, name: str) -> None:
    if part["shape"] != part["right shape"]:
        raise Wrong(
            f"{name}.weight has the shape {part['shape']}, and this rank's part is "
            f"{part['right shape']} (outputs, inputs).\nA column layer is cut along its outputs, "
            "a row layer along its inputs."
        )
    if not part["equal"]:
        raise Wrong(f"{name}.weight has the right shape, but holds another rank's part.")
    if part["bytes"] > part["shape"][0] * part["shape"][1] * 8:
        raise Wrong(
            f"{name}.weight is a view: it keeps {part['bytes']:,} bytes alive, the whole matrix.\n"
            "Nothing is saved so: .clone() the part."
        )


def _right_output(seen: dict, size: int, case: str) -> None:
    if seen["y error"] < 1e-9:
        return
    if size > 1 and seen["y error without bias"] < 1e-9:
        raise Wrong(f"{case}: the output has the bias {size} times, or not at all: add it after g.")
    if seen["differs between ranks"]:
        raise Wrong(f"{case}: each rank has another output. Partial results must be added up: g.")
    raise Wrong(f"{case}: the output differs from the whole layer's.")


def _right_gradients(seen: dict, size: int, case: str) -> None:
    if seen["dx error"] > 1e-9:
        raise Wrong(
            f"{case}: the output is right, and the gradient of x is not.\n"
            "Each rank knows only what its part makes of x. Who adds these up?"
        )
    for name, error in seen["gradient errors"].items():
        if error > 1e-9:
            raise Wrong(
                f"{case}: output and gradient of x are right, that of {name} is not.\n"
                "Is something of it computed on several ranks, or counted twice?"
            )


def _right_messages(seen: dict, size: int, case: str) -> None:
    if size == 1:
        return
    for way in ("forward", "backward"):
        calls, payload = seen[way]
        if calls > 1:
            raise Wrong(
                f"{case}: {calls} messages in the {way} pass; one will do.\n"
                "x enters once for all matrices that read it, and leaves once."
            )
        if payload > seen["bytes of x"]:
            raise Wrong(
                f"{case}: {payload:,} bytes handed over in the {way} pass; "
                f"{seen['bytes of x']:,} will do."
            )


def loss(path: Path) -> str:
    """Judges `vocabulary_loss`."""
    for size in RANKS:
        for rank, cases in enumerate(on_ranks(size, path, scenarios.loss, hang=HANG)):
            for name, seen in cases.items():
                _right_loss(seen, size, f"with {size} rank{'s' * (size > 1)}, rank {rank}, {name}")
    return (
        "loss and gradient equal cross_entropy's over the whole vocabulary, at large logits too;\n"
        "three numbers a token travel, never a logit more."
    )


def _right_loss(seen: dict, size: int, case: str) -> None:
    if not math.isfinite(seen["loss"]):
        raise Wrong(
            f"{case}: the loss is {seen['loss']}: exp overflows.\nSubtract the largest logit."
        )
    if abs(seen["loss"] - seen["right"]) > 1e-9 * max(1, abs(seen["right"])):
        hint = "Which of the three numbers of a token, largest, sum, target, is still a rank's own?"
        if seen["largest is own"]:
            hint = "exp(logit − largest) adds up only if all ranks subtract the same number."
        raise Wrong(f"{case}: the loss is {seen['loss']:.4f}, not {seen['right']:.4f}.\n{hint}")
    if seen["gradient error"] > 1e-9:
        raise Wrong(
            f"{case}: the loss is right, and the gradient of the logits is {seen['factor']:.3g} "
            "times what it should be.\nDoes a sum that goes forward through g come back as it is?"
        )
    if size > 1 and (seen["calls"] > 3 or seen["payload"] > 3 * seen["tokens"] * 8):
        raise Wrong(
            f"{case}: {seen['payload']:,} bytes in {seen['calls']} messages are handed over for "
            f"{seen['tokens']} tokens;\n{3 * seen['tokens'] * 8:,} bytes, three numbers a token, "
            "will do. Logits stay where they are."
        )
