"""Given: what the ranks do for a check: run your functions, and look at what they do.

A case is a dictionary, drawn by check_merge.py, check_ring.py or check_ulysses.py; what is whole
and right is computed from the same case in float64, here too.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from utils.course.messages import never_waited, noted
from utils.course.observe import PRODUCTS, Look, looks
from utils.course.runner import fractions
from utils.measure.traffic import tensors_in
from utils.shares import shares

FUSED = ("scaled_dot_product", "flash_attention", "efficient_attention")  # a kernel's name has one

# ---- 1. the sequence, whole and shared out


def places_of(case: dict, size: int) -> list[list[int]]:
    """The positions of each rank: neighbours, or an early and a late block."""
    length = case["length"]
    if not case["zigzag"]:
        counts = shares(length, size)
        return [list(range(sum(counts[:r]), sum(counts[: r + 1]))) for r in range(size)]
    counts = shares(length, 2 * size)
    blocks = [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(2 * size)]
    return [blocks[r] + blocks[-1 - r] for r in range(size)]


def whole(case: dict) -> dict[str, torch.Tensor]:
    """q, k, v and dout of the whole sequence, in the case's type."""
    made = {}
    for i, (name, heads) in enumerate((("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"),
                                       ("dout", "heads"))):
        shape = case["batch"], case["length"], case[heads], case["width"]
        made[name] = fractions(case["seed"] + i, *shape)
        if name in "qk":
            made[name] *= case["scale"] ** 0.5
        made[name] = made[name].to(case["dtype"])
    return made


def block_bytes(case: dict, count: int) -> int:
    """Keys and values of `count` positions."""
    return 2 * case["batch"] * count * case["kv_heads"] * case["width"] * case["dtype"].itemsize


def near(case: dict, size: int, kinds: int) -> int:
    """Bytes of others that a rank may hold at a time: of each kind (blocks, their gradients) one to
    compute with, one on its way, and one that a name still holds."""
    return 3 * kinds * block_bytes(case, max(map(len, places_of(case, size))))


def own(case: dict, rank: int, size: int) -> dict[str, torch.Tensor]:
    """The same of a rank; sliced: q, k and v are parts of one tensor, as one matrix makes them."""
    mine = places_of(case, size)[rank]
    parts = {name: x[:, mine] for name, x in whole(case).items()}
    if case["sliced"]:
        names = ("q", "k", "v")
        together = torch.cat([parts[name] for name in names], dim=2)
        parts |= zip(names, together.split([parts[name].shape[2] for name in names], dim=2))
    return parts


def right(case: dict, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """out, lse and the gradients of the whole sequence in float64; the largest score, and how large
    the terms are that may cancel in a gradient.

    mask (T, T): who looks at whom, causal where None.
    """
    made = {name: x.double() for name, x in whole(case).items()}
    leaves = [made[name].requires_grad_() for name in "qkv"]
    group = case["heads"] // case["kv_heads"]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    if mask is None:
        mask = torch.ones(case["length"], case["length"], dtype=torch.bool).tril()
    scores = q @ k.mT / case["width"] ** 0.5
    largest = scores.detach().abs().max().item()
    scores = scores.masked_fill(~mask, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    gradients = torch.autograd.grad(out, leaves, made["dout"])
    lse = scores.detach().logsumexp(-1).transpose(1, 2)
    terms = (made["dout"].transpose(1, 2) @ v.detach().mT).abs().max() / case["width"] ** 0.5
    terms = terms * max(x.detach().abs().max() for x in leaves[:2])
    found = {"out": out.detach(), "lse": lse, "largest": largest, "terms": terms.item()}
    return found | dict(zip(("dq", "dk", "dv"), gradients))


# ---- 2. what is seen of an answer


class Work(NamedTuple):
    """A product: how many multiplications, and how many messages had been noted before it."""

    multiplications: int
    place: int


class AttentionLook(Look):
    """A `Look` that also counts attention kernels, says when each product was, and how much of what
    was received is in memory at a time.

    notes: of `noted()`, opened before; near: bytes received that may be in memory at a time. Where
    they are more, the backend is given the time to let go of them, once.
    """

    def __init__(self, notes: list, near: int, **inputs: Any):
        super().__init__(**inputs)
        self._notes, self._near, self._received = notes, near, []
        self.works: list[Work] = []
        self.held = 0  # bytes received, or on their way here, at most at a time

    def saw(self, func: Callable, given: Any, outputs: bool) -> None:
        super().saw(func, given, outputs)
        if outputs:
            return
        name = func.__name__.split(".")[0]
        if name.startswith(("recv_", "irecv")) and func.namespace == "c10d":
            self._received.append(weakref.ref(next(tensors_in(given)).untyped_storage()))
            for _ in looks() if self.held <= self._near else ():
                if self._held_now() <= self._near:
                    break
            self.held = max(self.held, self._held_now())
        elif any(word in name for word in FUSED):
            q, k = given[0][:2]
            if "backward" in name:
                q, k = given[0][1:3]
            steps = 5 if "backward" in name else 2
            count = steps * math.prod(q.shape) * k.shape[-2]  # heads come before positions
            self.works.append(Work(count, len(self._notes)))
        elif name in PRODUCTS and func.namespace == "aten":
            self.works.append(Work(self.products[-1].multiplications, len(self._notes)))

    def _held_now(self) -> int:
        alive = {id(storage): storage for one in self._received if (storage := one()) is not None}
        return sum(storage.nbytes() for storage in alive.values())


def _seen(look: AttentionLook, notes: list) -> dict:
    return {
        "events": look.events, "largest": look.largest, "changed": look.changed(),
        "never waited": never_waited(notes), "notes": notes, "works": look.works,
        "held": look.held,
    }


# ---- 3. what a rank does


def merges(answer, cases: list[dict]) -> list[dict]:
    """Several merges, one after the other."""
    found, kept = [], 0
    for case in cases:
        given = parts_of(case)
        with Look(**given) as look:
            result = answer.merge(*given.values())
        out, lse = _pair(result)
        found.append({
            "out": _copy(out), "lse": _copy(lse), "changed": look.changed(),
            "largest": look.largest, "events": look.events,
        })
        del result, out, lse, given
        found[-1]["kept"] = kept = kept or look.kept()
    return found


def parts_of(case: dict) -> dict[str, torch.Tensor]:
    """What `merge` is given: two attentions, of which `nothing` says where each has seen no key."""
    seed, shape, dtype = case["seed"], case["shape"], case["dtype"]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    parts = {}
    for i, name in enumerate(("out", "more")):
        result = fractions(seed + i, *shape)
        lse = fractions(seed + 7 + i, *shape[:-1]) + case["around"][i]
        empty = case["nothing"][i]
        if empty:
            rows = fractions(seed + 17 + i, *shape[:-1]) > 0.2
            rows = torch.ones_like(rows) if empty == "all" else rows
            lse[rows], result[rows] = -torch.inf, 0.0
        if case["nan"] == i:
            result[(0,) * (len(shape) - 1)] = torch.nan
        parts[name] = result.to(dtype)
        parts["lse" if i == 0 else "more_lse"] = lse.to(exact)
    if case["transposed"]:  # the same numbers in another layout, as attention often returns them
        parts = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in parts.items()}
    return parts


def attentions(answer, name: str, cases: list[dict]) -> list[dict]:
    """On a rank: `ring_attention`, `zigzag_attention` or `ulysses_attention`, one after another."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for case in cases:
        mine = own(case, rank, size)
        inputs = {part: mine[part] for part in "qkv"}
        with noted() as notes, AttentionLook(notes, near(case, size, 1), **inputs) as look:
            result = getattr(answer, name)(*inputs.values(), case["length"])
        out, lse = (result, None) if name == "ulysses_attention" else _pair(result)
        found.append({"out": _copy(out), "lse": _copy(lse)} | _seen(look, notes))
        del result, out, lse, inputs, mine
        found[-1]["kept"] = look.kept()
    return found


def backwards(answer, cases: list[dict]) -> list[dict]:
    """On a rank: `ring_attention_backward`, from the results that are right."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for case in cases:
        mine, places = own(case, rank, size), places_of(case, size)[rank]
        all_of = right(case)
        results = {name: all_of[name][:, places].to(case["dtype"]) for name in ("out", "lse")}
        inputs = {name: mine[name] for name in ("dout", "q", "k", "v")} | results
        with noted() as notes, AttentionLook(notes, near(case, size, 2), **inputs) as look:
            gradients = answer.ring_attention_backward(*inputs.values(), case["length"])
        names, given = ("dq", "dk", "dv"), gradients
        if not isinstance(given, tuple | list) or len(given) != 3:
            given = [gradients] * 3  # the check says what this is
        found.append({n: _copy(x) for n, x in zip(names, given)} | _seen(look, notes))
        del gradients, given, inputs, mine, results, all_of
        found[-1]["kept"] = look.kept()
    return found


def zigzags(answer, cases: list[tuple[int, int]]) -> list:
    """Positions of each rank by `zigzag_positions`, as lists of numbers."""
    return [
        [[[int(n) for n in block] for block in mine] for mine in answer.zigzag_positions(*case)]
        for case in cases
    ]


def heads(answer, cases: list[tuple[int, int, int]]) -> list:
    """Heads of each rank by `heads_of_ranks`, as lists of numbers; what it says if it refuses."""
    found = []
    for case in cases:
        try:
            both = answer.heads_of_ranks(*case)
        except ValueError as error:
            found.append(str(error))
        except AssertionError:
            if case[2] <= case[0]:
                raise
            found.append(None)  # refused, but with no ValueError
        else:
            found.append([[[int(n) for n in mine] for mine in one] for one in both])
    return found


def refused(answer, case: dict) -> dict:
    """On a rank: what `ulysses_attention` says where there are more ranks than heads."""
    mine, said = own(case, dist.get_rank(), dist.get_world_size()), None
    with Look() as look:
        try:
            answer.ulysses_attention(mine["q"], mine["k"], mine["v"], case["length"])
        except ValueError as error:
            said = str(error)
        except AssertionError:
            pass  # that is no ValueError
    return {"said": said, "events": look.events}


def _pair(result: Any) -> tuple[Any, Any]:
    """(out, lse); what is no pair stands for both, and the check says what it is."""
    pair = isinstance(result, tuple | list) and len(result) == 2
    return tuple(result) if pair else (result, result)


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x
