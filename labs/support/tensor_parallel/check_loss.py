"""Given: what the check cell of d looks at: loss, gradient, numbers that travel, and memory.

1 to 6 real ranks compute the loss of their words, equal or not; it must be that of the whole
vocabulary in float64.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labs.support.tensor_parallel.judging import (
    ASKED,
    HANG,
    LIBRARY,
    TYPES,
    equal,
    name_of,
    no_messages,
    nothing_kept,
    runs,
)
from labs.support.tensor_parallel.scenarios import seen
from utils.course.assertions import Wrong, close, number, same_bits, unchanged
from utils.course.observe import Look
from utils.course.runner import Group, Trial, fractions


def loss(trial: Trial) -> str:
    """Judges `vocabulary_loss`."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        kinds = _LOSSES if group.size < 4 else trial.draw.sample(_LOSSES, 4)
        kinds += ("long", "wide") if group.size == 2 else ()
        cases = [_loss_case(trial, group.size, kind, i) for i, kind in enumerate(kinds)]
        for some, late in runs(group, cases):
            ranks = group.run(group.case("some batches"), losses, some, late=late)
            for i, case in enumerate(some):
                _right_losses(group, case, [found[i] for found in ranks], late)
    return (
        "loss and gradient equal those of the whole vocabulary on 1 to 6 ranks: smoothing, z,\n"
        "tokens that do not count, masked words, large logits, three types; no more is sent than\n"
        "three numbers a token; one tensor of this rank's logits is kept, none of all words made."
    )


_LOSSES = ("plain", "large", "smoothed", "masked", "bf16", "nothing counts", "a NaN")


def _loss_case(trial: Trial, size: int, kind: str, i: int) -> dict:
    draw = trial.draw
    least = {"long": 2, "wide": 50_000}.get(kind, 40)
    sizes = [draw.randrange(least, 2 * least) for _ in range(size)]
    words, shape = sum(sizes), (draw.randrange(1, 4), draw.randrange(1, 9))
    if kind in ("long", "wide"):
        shape = (draw.randrange(9, 12), draw.randrange(1900, 2100)) if kind == "long" else (1, 1)
    ends = [sum(sizes[:r]) for r in range(size)] + [sum(sizes[: r + 1]) - 1 for r in range(size)]
    targets = [draw.choice(ends) if draw.random() < 0.4 else draw.randrange(words)
               for _ in range(shape[0] * shape[1])]
    masked = set()
    if kind == "masked":  # some words, and all of one rank's; no target is one of them
        masked = {word for word in range(1, words) if draw.random() < 0.2}
        rank = draw.randrange(1, size + 1)
        masked |= set(range(sum(sizes[:rank]), sum(sizes[: rank + 1])))  # none for the last
        targets = [draw.choice([w for w in range(words) if w not in masked]) for _ in targets]
    skipped = {"nothing counts": 1.0, "plain": 0.0, "wide": 0.0}.get(kind, 0.4)
    counted = targets[0]
    targets = [-100 if draw.random() < skipped else target for target in targets]
    if kind != "nothing counts" and set(targets) == {-100}:
        targets[0] = counted
    terms = {}
    if kind in ("large", "bf16", "smoothed"):
        terms["smoothing"] = draw.choice((0.05, 0.1, 0.3))
    if kind in ("smoothed", "bf16", "masked", "nothing counts"):
        terms["z"] = draw.uniform(1e-4, 0.05)
    dtype = torch.bfloat16 if kind in ("bf16", "long") else TYPES[(i + size) % 2]
    return {
        "kind": kind, "sizes": sizes, "shape": shape, "targets": targets, "masked": sorted(masked),
        "terms": terms, "scale": draw.uniform(500, 2000) if kind == "large" else draw.uniform(1, 6),
        "offset": draw.choice((-900, 900)) if kind in ("smoothed", "masked") else 0.0,
        "nan": draw.randrange(1, words) if kind == "a NaN" else 0, "dtype": dtype,
        "weighed": kind in ("plain", "bf16"), "factor": draw.uniform(0.3, 3.0),
        "seed": trial.new_seed(),
    }


def _right_losses(group: Group, case: dict, ranks: list[dict], late: bool) -> None:
    size, right = group.size, right_loss(case)
    tokens, wide = len(case["targets"]), case["dtype"] == torch.float64
    kept_type = torch.float64 if wide else torch.float32
    most = 3 * tokens * kept_type.itemsize
    words = {"plain": "no token is ignored", "large": "logits of some thousands",
             "smoothed": "smoothing and z", "masked": "masked words", "bf16": "smoothing and z",
             "nothing counts": "no token counts", "a NaN": "a NaN among the logits",
             "long": "many tokens", "wide": "many words"}
    here = (
        f"{tokens} tokens, {', '.join(map(str, case['sizes']))} words in {name_of(case['dtype'])}, "
        f"{words[case['kind']]}{', results coming late' * late}"
    )
    for rank, one in enumerate(ranks):
        where = group.case(f"{here}, rank {rank}")
        near = equal(one["loss"], right["loss"])
        hint = "" if near else _loss_hint(one["loss"], right["loss"], case)
        slack = 64 + 2 * right["largest"]  # log Z of large logits is rounded, and its exp again
        close(
            where, "the loss", one["loss"], right["loss"], hint=hint, dtype=kept_type, slack=slack
        )
        unchanged(where, one["changed"])
        unchanged(f"{where}, {ASKED}", one["asking"]["changed"])
        close(f"{where}, {ASKED}", "the loss", one["asked"], right["loss"], slack=slack)
        own = right["gradient"].split(case["sizes"], dim=-1)[rank]
        if case["kind"] != "a NaN":
            slack = 1 if case["dtype"] == torch.bfloat16 else slack
            hint = _factor_hint(one["gradient"], own)
            what = "the gradient of the logits"
            close(where, what, one["gradient"], own, hint=hint, dtype=case["dtype"], slack=slack)
        _few_numbers(where, one["forward"]["events"], most, tokens, size)
        _few_numbers(f"{where}, {ASKED}", one["asking"]["events"], most, tokens, size)
        no_messages(f"{where}, backward", one["backward"]["events"], size)
        if not late:
            _small(where, one, case, rank)
    same_bits(group.case(here), "the loss", [one["loss"] + 0.0 for one in ranks])  # −0 is 0


def _few_numbers(where: str, events: list, most: int, tokens: int, size: int) -> None:
    """No more than three all-reduces of a number a token send."""
    sent, allowed = sum(event.sent for event in events), 2 * (size - 1) * most / size
    if len(events) > 3 or sent > allowed + 1e-6:
        raise Wrong(
            f"{where}: {len(events)} messages, in which a rank sends {float(sent):,.0f} bytes for "
            f"{tokens} tokens;\n{allowed:,.0f} bytes will do: all-reduces of three numbers a token."
            " Logits stay where they are."
        )


def _small(where: str, one: dict, case: dict, rank: int) -> None:
    """No tensor longer than this rank's logits, and one of that length kept."""
    tokens = len(case["targets"])
    logits = torch.empty(tokens, case["sizes"][rank], dtype=case["dtype"], device="meta")
    buffer = buffer_bytes(logits)
    for half in ("forward", "backward"):
        if one[half]["largest"] > buffer:
            raise Wrong(
                f"{where}: the {half} pass makes a tensor of {one[half]['largest']:,} bytes. "
                f"This rank's logits are\n{buffer:,} bytes in the type of the loss. Which words "
                "does it need?"
            )
    if one["saved"] > one["allowed"]:
        raise Wrong(
            f"{where}: {one['saved']:,} bytes are kept for the backward pass; {one['allowed']:,} "
            "will do:\none tensor of this rank's logits, and single numbers a token. Which "
            "operation keeps which of its inputs?"
        )
    nothing_kept(where, one["kept"])


def _loss_hint(got, right: torch.Tensor, case: dict) -> str:
    if not isinstance(got, torch.Tensor) or got.dim():
        return ""
    value, counted = got.double().item(), sum(target != -100 for target in case["targets"])
    if case["kind"] == "nothing counts":
        return "The mean over no token: what is it divided by?"
    if value != value or abs(value) == float("inf"):
        if case["kind"] == "masked":
            return "exp(−inf) is 0. What are 0 · (−inf) and (−inf) − (−inf)?"
        if case["kind"] == "large":
            return "exp of thousands is infinite, of minus thousands 0: what is subtracted first?"
    tokens = len(case["targets"])
    if counted != tokens and equal(got, right * counted / tokens):
        return "It is divided by all tokens: how many count?"
    if case["terms"].get("smoothing") or case["terms"].get("z"):
        for without in ("smoothing", "z"):
            terms = {k: v for k, v in case["terms"].items() if k != without}
            if len(terms) < len(case["terms"]) and equal(
                got, right_loss({**case, "terms": terms})["loss"]
            ):
                return f"It is the loss without {without}."
    if equal(got, own_largest_loss(case)):
        return "exp(logit − largest) adds up only if all ranks subtract the same number."
    return "Which of the numbers of a token is still a rank's own?"


def _factor_hint(got, right: torch.Tensor) -> str:
    """Whether a gradient is a multiple of the right one."""
    if isinstance(got, torch.Tensor) and got.shape == right.shape and right.norm() > 0:
        factor = ((got.double() * right).sum() / right.square().sum()).item()
        if equal(got, factor * right) and abs(factor - 1) > 0.01:
            return f"It is {number(factor)} times that. What comes back, through g and of the loss?"
    return "The loss is right. What does each of its terms make of a logit?"


# ---- on a rank


def whole_logits(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits of all words (B, T, V), targets (B, T)) of a case."""
    b, t = case["shape"]
    words = sum(case["sizes"])
    numbers = case["offset"] + case["scale"] * fractions(case["seed"], b, t, words)
    logits = numbers.to(case["dtype"])
    for word in case["masked"]:
        logits[..., word] = -torch.inf
    if case["nan"]:
        logits[0, 0, case["nan"]] = torch.nan
    return logits, torch.tensor(case["targets"]).view(b, t)


def losses(answer, cases: list[dict]) -> list[dict]:
    """On a rank: the losses of some batches, and the gradients of this rank's logits. All go
    forward, and then all come back."""
    rank, found, running = dist.get_rank(), [], []
    with Look() as always:
        for case in cases:
            logits, targets = whole_logits(case)
            own = logits.split(list(case["sizes"]), dim=-1)[rank].contiguous().requires_grad_()
            with Look(logits=own, targets=targets) as look:
                loss = answer.vocabulary_loss(own, targets, tuple(case["sizes"]), **case["terms"])
            same = own.detach().clone()
            with Look(logits=same, targets=targets) as asking, torch.no_grad():
                asked = answer.vocabulary_loss(same, targets, tuple(case["sizes"]), **case["terms"])
            one = {"loss": loss.detach().clone(), "forward": seen(look), "saved": 0, "allowed": 0,
                   "asked": asked.clone(), "asking": seen(asking)}
            if case["weighed"]:
                one["allowed"] = buffer_bytes(own) + 64 * targets.numel() + 256
                one["saved"] = look.kept(loss, allowed=one["allowed"])
            found.append(one)
            running.append((own, loss, look, case["factor"]))
        for one, (own, loss, look, factor) in zip(found, running):
            with Look() as backward:
                (loss * factor).backward()
            one |= {"gradient": own.grad, "backward": seen(backward), "changed": look.changed()}
        del logits, targets, own, same, loss, look, backward, one, asked, asking
        running.clear()
    kept = always.kept(found)
    return [{**one, "kept": kept} for one in found]


def buffer_bytes(logits: torch.Tensor) -> int:
    """Of one tensor of this rank's logits in the type that the loss is computed in."""
    return logits.numel() * max(4, logits.element_size())


def right_loss(case: dict, other: torch.Tensor | None = None) -> dict:
    """The loss of the whole vocabulary in float64, the gradients of all logits, and how large these
    are. other: logits in place of the case's."""
    logits, targets = whole_logits(case)
    logits = (logits if other is None else other).double().requires_grad_()
    counts = targets != -100
    smoothing, z = case["terms"].get("smoothing", 0.0), case["terms"].get("z", 0.0)
    rows, labels = logits[counts], targets[counts]
    entropy = F.cross_entropy(rows, labels, reduction="sum", label_smoothing=smoothing)
    total = entropy + z * rows.logsumexp(-1).square().sum()
    loss = total / max(1, int(counts.sum()))
    (loss * case["factor"]).backward()
    largest = logits.detach().nan_to_num(0, 0, 0).abs().max().item()
    return {"loss": loss.detach(), "gradient": logits.grad, "largest": largest}


def own_largest_loss(case: dict) -> torch.Tensor:
    """What comes out if each rank subtracts the largest of its own logits."""
    logits, _ = whole_logits(case)
    own = [p - p.amax(-1, True) for p in logits.double().split(case["sizes"], dim=-1)]
    return right_loss(case, torch.cat(own, dim=-1))["loss"]
