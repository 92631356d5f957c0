"""Given: what the checks of b, c and d have in common: cases, values, messages, work and memory."""

from collections.abc import Sequence

import torch

from labs.support.context_parallel import scenarios
from utils.course.assertions import SLACK, Wrong, close, unchanged
from utils.course.runner import Group, Trial

LIBRARY = (
    "utils.parallel", "torch.distributed.tensor", "dist.tensor", "torch.distributed.nn", "dist.nn",
    "deepspeed", "context_parallel", "_functional_collectives",
    "torch.distributed._functional_collectives",
)
HANG = {
    "send": "dist.send comes back only when the other rank has begun to receive. When all ranks "
    "send\nfirst, nobody receives: start both messages (isend, irecv), then wait.",
    "recv": "All ranks wait to receive, and nobody has sent: start the send first, without "
    "waiting.",
    "": "Who sends what a waiting rank is to receive? Does every rank take every turn, also one "
    "that\nhas nothing to compute in it? A work is waited for once: a second wait() never ends.",
}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases(trial: Trial, size: int, zigzag: bool = False, least: int = 1) -> list[dict]:
    """Two cases: types, shapes and layouts are drawn. In the first N (or 2N blocks) does not divide
    the length, and scores are so large that exp overflows; in the second it does divide, and a
    block is wide enough that all keys together stand out."""
    draw, found = trial.draw, []
    dtypes = draw.sample([torch.float64, torch.float32], 2)
    parts = 2 * size if zigzag else size
    for i, dtype in enumerate(dtypes):
        each = draw.randrange(1 + (i > 0), 4)
        length = parts * each + (draw.randrange(1, parts) if i == 0 and parts > 1 else 0)
        kv_heads = draw.randrange(1, 4)
        group = draw.randrange(1, 4) if i == 0 else 1
        while kv_heads * group < least:
            group += 1
        if size == 2 and i == 1:  # a long one
            length = parts * draw.randrange(17, 20)
        found.append({
            "length": length, "batch": draw.randrange(1, 4), "kv_heads": kv_heads,
            "heads": kv_heads * group, "width": draw.randrange(2, 6) if i == 0 else 16 + each,
            "dtype": dtype, "seed": trial.new_seed(), "zigzag": zigzag,
            "scale": 400.0 if i == 0 else 1.0, "sliced": draw.random() < 0.5,
        })
    return found


def words_of(group: Group, case: dict, rank: int, late: bool) -> str:
    """The case in words."""
    keys = f"{case['heads']} query and {case['kv_heads']} key-value heads"
    words = f"{case['length']} positions, {keys} of {case['width']} in {name_of(case['dtype'])}"
    words += ", large scores" * (case["scale"] > 1) + ", messages coming late" * late
    return group.case(f"{words}, rank {rank}")


def run_all(group: Group, scenario, *args, some: list[dict]) -> list[tuple[dict, list[dict], bool]]:
    """(case, what is seen by rank, whether messages come late): the cases, and on 2 and 3 ranks
    the first of them again with messages that come late."""
    runs = [(some, False)] + [(some[:1], True)] * (group.size in (2, 3))
    found = []
    for these, late in runs:
        words = f"{these[0]['length']} positions" + ", messages coming late" * late
        ranks = group.run(group.case(words), scenario, *args, these, late=late)
        found += [(case, [one[i] for one in ranks], late) for i, case in enumerate(these)]
    return found


def right_values(
    where: str, case: dict, mine: list[int], found: dict, right: dict, names: Sequence[str],
    hint: str,
) -> None:
    """The rank's part of what is right of the whole sequence."""
    slack = SLACK + 8 * right["largest"]
    for name in names:
        scale = max(right[name].abs().max().item(), right["terms"] * (name in ("dq", "dk")))
        close(
            where, name, found[name], right[name][:, mine], hint=hint, dtype=case["dtype"],
            slack=slack, scale=scale,
        )
    unchanged(where, found["changed"], "Attention leaves what it is given as it is.")


def is_right(case: dict, mine: list[int], found: dict, right: dict, name: str) -> bool:
    """Whether one of the rank's results is."""
    try:
        right_values("", case, mine, found | {"changed": []}, right, (name,), "")
    except Wrong:
        return False
    return True


def alike(got, right: torch.Tensor) -> bool:
    """Whether wrong numbers are these other ones."""
    return (
        isinstance(got, torch.Tensor)
        and got.shape == right.shape
        and torch.allclose(got.double(), right, rtol=1e-3, atol=1e-4)
    )


# ---- messages


def ring_messages(where: str, case: dict, found: dict, rank: int, size: int, gradients: bool):
    """Only sends to the next rank and receives from the one before, of no more than the blocks, and
    of the gradients' blocks; all of them waited for."""
    others = sorted({event.op for event in found["events"]} - {"send", "recv"})
    if others:
        raise Wrong(
            f"{where}: {', '.join(others)} is called, and a ring is made of sends and receives."
        )
    for event in found["events"]:
        goal = (rank + 1) % size if event.op == "send" else (rank - 1) % size
        if event.peer not in (None, -1, goal):
            way = "sends to" if event.op == "send" else "receives from"
            raise Wrong(
                f"{where}: this rank {way} rank {event.peer}. In a ring it sends to the next, rank "
                f"{(rank + 1) % size},\nand receives from the one before, rank {(rank - 1) % size}."
            )
    blocks = [scenarios.block_bytes(case, len(mine)) for mine in scenarios.places_of(case, size)]
    limit = sum(blocks) - blocks[(rank + 1) % size] + gradients * sum(blocks)
    sent = [event.payload for event in found["events"] if event.op == "send"]
    if size > 1 and sum(sent) > limit:
        what = "N − 1 blocks" + " and N of gradients" * gradients
        raise Wrong(
            f"{where}: this rank sends {sum(sent):,} bytes, and {what} have {limit:,}. Which block "
            "does\nthe next rank have already? Does anything travel twice, or wider than it is?"
        )
    most = 2 * (size - 1) + 2 * size * gradients
    if size > 1 and len(sent) > most:
        raise Wrong(f"{where}: this rank sends {len(sent)} messages, and {most} will do.")
    for call in found["never waited"]:
        raise Wrong(f"{where}: nobody waits for an {call}. When may its tensor be used again?")


def under_way(where: str, found: dict) -> None:
    """Whenever a rank computes and has more to receive, a receive is under way; so with sends."""
    notes = found["notes"]
    waited = {}  # number of a call -> when it was waited for
    for place, note in enumerate(notes):
        if note.name == "wait":
            waited.setdefault(note.number, place)
    calls = {"irecv": [], "isend": []}
    for place, note in enumerate(notes):
        if note.name in calls:
            calls[note.name].append((place, waited.get(place, len(notes))))
    for name, what in (("irecv", "to this rank"), ("isend", "from this rank")):
        for i, work in enumerate(found["works"]):
            now = work.place
            running = any(begin < now <= end for begin, end in calls[name])
            later = any(begin >= now for begin, _ in calls[name])
            if not running and (later or (i == 0 and calls[name])):
                raise Wrong(
                    f"{where}: it computes while nothing is under way {what}, and it has messages "
                    "that could be.\nStart the next messages first, then compute, then wait."
                )


# ---- work and memory


def no_more_work(where: str, case: dict, found: dict, pairs: int, steps: int, hint: str) -> int:
    """Multiplications of this rank; pairs: of a query and a key that it may look at; steps:
    products of each."""
    done = sum(work.multiplications for work in found["works"])
    each = steps * case["batch"] * case["heads"]
    if done > each * pairs * (case["width"] + 1):  # one more: for those who sum by a product
        raise Wrong(
            f"{where}: it multiplies {done:,} times, and {each * pairs * case['width']:,} will do."
            f"\n{hint}"
        )
    return done


def memory(where: str, case: dict, found: dict, mine: int, size: int, kinds: int) -> None:
    """No tensor is larger than it need be, no more blocks of others are there than two of each kind
    (blocks, their gradients), and nothing stays. mine: how many positions this rank has."""
    longest = max(map(len, scenarios.places_of(case, size)))
    block, value = scenarios.block_bytes(case, longest), case["dtype"].itemsize
    scores = case["batch"] * case["heads"] * mine * longest * value
    rows = case["batch"] * case["heads"] * longest * (case["width"] + 1) * value
    wider = 8 // value  # sums may be kept in fp64
    if found["largest"] > max(wider * scores, wider * rows, 2 * block):
        raise Wrong(
            f"{where}: a tensor of {found['largest']:,} bytes is made; the scores of this rank's "
            f"queries and one\nblock have {scores:,}, and one block's keys and values {block:,}. "
            "What is larger?"
        )
    if found["held"] > scenarios.near(case, size, kinds):
        raise Wrong(
            f"{where}: {found['held']:,} bytes that came from others are in memory at a time, and "
            f"{2 * kinds} blocks have\n{2 * kinds * block:,}. Who still holds those that were "
            "computed with?"
        )
    nothing_kept(where, found)


def nothing_kept(where: str, found: dict) -> None:
    if found["kept"]:
        raise Wrong(
            f"{where}: when it is done, {found['kept']:,} bytes that it made are still held.\n"
            "Who remembers them, and what for?"
        )
