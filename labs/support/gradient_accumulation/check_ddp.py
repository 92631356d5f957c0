"""Given: what the check cell of exercise 02b looks at.

1, 2 and 3 real ranks make three steps with your `train_step`. The weights must equal those of one
rank with the whole batch, and each other; `utils.measure.traffic` counts DDP's all-reduces.
"""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from labs.support.gradient_accumulation import tiny_model
from utils.course.checks import Wrong, on_ranks
from utils.measure.traffic import Traffic

STEPS, LR = 3, 0.5
CLIP = 0.08  # below the norm of these gradients: clipping matters
# Tokens that count in each row of each micro-batch: a list for each rank, equally many for all.
SHARES = [
    [[7, 6, 7], [1], [2, 3], [5]],
    [[4, 4], [0, 0], [7], [1, 1, 1]],
    [[3], [3, 7], [6, 6, 6, 6], [0]],
]
NORMS = (math.inf, CLIP)
SMALL = 64  # bytes: what a count or a loss may need


def ddp(path: Path) -> str:
    """Judges `tokens_of_all` and `train_step` in the file."""
    for size in (1, 2, 3):
        hang = "Does every rank make the same calls, also for an empty micro-batch?"
        both = on_ranks(size, path, _train_twice, hang=hang)
        for max_norm, results in zip(NORMS, zip(*both)):
            clip = "" if max_norm == math.inf else f" clipped to {max_norm}"
            where = f"with {size} ranks{clip}"
            _right_tokens(results, where)
            _right_messages(results, where)
            _one_model(results, where)
            _right_weights(results, size, max_norm, where)
    return (
        f"three steps equal one rank's with the whole batch, on 1, 2 and 3 ranks, also clipped;\n"
        f"{len(SHARES[0])} micro-batches, one all-reduce of the gradients a step, one model on "
        "all ranks."
    )


def _shares(step: int, size: int) -> list[list[tiny_model.MicroBatch]]:
    return [tiny_model.micro_batches(10 * step + rank, SHARES[rank]) for rank in range(size)]


def _flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _train_twice(answer) -> list[dict]:
    """On a rank: without clipping and with it."""
    return [_train(answer, max_norm) for max_norm in NORMS]


def _train(answer, max_norm: float) -> dict:
    """On a rank: the steps with the answer, then what one rank would do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DDP(tiny_model.new_model(), bucket_cap_mb=100)
    for _ in range(2):  # DDP agrees on the order of its buckets once: not to be counted
        tiny_model.loss_sum(model, *_shares(0, 1)[0][0]).backward()
        model.zero_grad()
    gradients = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    made = []
    optimizer.register_step_post_hook(lambda *_: made.append(1))
    result = {"losses": [], "large": [], "small": [], "other": set(), "weights": []}
    shares = _shares(0, size)
    result["tokens"] = answer.tokens_of_all(shares[rank])
    result["right_tokens"] = sum(tiny_model.counted(y) for share in shares for _, y in share)
    for step in range(STEPS):
        with Traffic() as traffic:
            loss = answer.train_step(model, _shares(step, size)[rank], optimizer, max_norm)
        result["losses"].append(None if loss is None else float(loss))
        reduces = [event.payload for event in traffic.events if event.op == "all_reduce"]
        result["large"].append([payload for payload in reduces if payload > SMALL])
        result["small"].append([payload for payload in reduces if payload <= SMALL])
        result["other"] |= {event.op for event in traffic.events} - {"all_reduce"}
        result["weights"].append(_flat(model.parameters()))
        left = [p.grad for p in model.parameters() if p.grad is not None]
        result["left"] = any(bool(grad.any()) for grad in left)
    result["gradients"], result["steps"] = gradients, len(made) / STEPS
    result["alone"] = _alone(size, max_norm, "tokens")
    result["means"] = _alone(size, max_norm, "means")[0]
    return result


def _alone(size: int, max_norm: float, mean: str) -> tuple[list[torch.Tensor], list[float]]:
    """Weights after each step and losses of one process that has all micro-batches."""
    model, weights, losses = tiny_model.new_model(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        batches = [batch for share in _shares(step, size) for batch in share]
        counts = [tiny_model.counted(y) for _, y in batches]
        sums = [tiny_model.loss_sum(model, x, y) for x, y in batches]
        loss = sum(sums) / sum(counts)
        if mean == "means":
            loss = sum(s / max(c, 1) for s, c in zip(sums, counts)) / len(sums)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        weights.append(_flat(model.parameters()))
        losses.append(loss.item())
    return weights, losses


def _close(a, b) -> bool:
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (a, b))
    return torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def _right_tokens(results: list[dict], where: str) -> None:
    for rank, result in enumerate(results):
        if result["tokens"] != result["right_tokens"]:
            raise Wrong(
                f"{where}, rank {rank}: tokens_of_all returns {result['tokens']}, but "
                f"{result['right_tokens']} tokens count on all ranks together."
            )


def _right_messages(results: list[dict], where: str) -> None:
    for rank, result in enumerate(results):
        case = f"{where}, rank {rank}"
        if result["steps"] != 1:
            raise Wrong(
                f"{case}: train_step makes {result['steps']:g} optimizer steps. One is right, "
                "after all micro-batches."
            )
        if result["other"]:
            raise Wrong(f"{case}: a step calls {', '.join(sorted(result['other']))}; only "
                        "all-reduces are needed.")  # fmt: skip
        for step in range(STEPS):
            large, small = result["large"][step], result["small"][step]
            case = f"{where}, rank {rank}, step {step + 1}"
            if not large:
                raise Wrong(
                    f"{case}: the gradients are never all-reduced.\n"
                    "The last micro-batch runs outside of no_sync, forward and backward."
                )
            if len(large) > 1:
                raise Wrong(
                    f"{case}: {len(large)} all-reduces of gradients, and one is enough.\n"
                    "Is the *forward* pass inside no_sync, too? DDP decides there. And DDP does "
                    "all of them itself."
                )
            if large[0] > result["gradients"]:
                raise Wrong(f"{case}: an all-reduce of {large[0]:,} bytes, the gradients have "
                            f"{result['gradients']:,}.")  # fmt: skip
            if len(small) > 2:
                raise Wrong(
                    f"{case}: {len(small)} small all-reduces. Two are enough: the tokens before "
                    "the first micro-batch, the loss after the last."
                )


def _one_model(results: list[dict], where: str) -> None:
    for step in range(STEPS):
        first = results[0]["weights"][step]
        for rank, result in enumerate(results):
            if not result["weights"][step].equal(first):
                raise Wrong(
                    f"{where}: after step {step + 1} rank {rank} and rank 0 hold different "
                    "models, though the number of all-reduces is right.\n"
                    "Which micro-batch was all-reduced? DDP reads the flag in the forward pass."
                )


def _right_weights(results: list[dict], size: int, max_norm: float, where: str) -> None:
    clipped = max_norm != math.inf
    for rank, result in enumerate(results):
        case = f"{where}, rank {rank}"
        right, right_losses = result["alone"]
        for step in range(STEPS):
            weights = result["weights"][step]
            if not _close(weights, right[step]):
                raise Wrong(
                    f"{case}: the weights after step {step + 1} differ from those of one rank.\n"
                    f"{_reason(result, step, size, clipped)}"
                )
        if result["left"]:
            raise Wrong(f"{case}: gradients are left over after the step: zero them.")
        for step, loss in enumerate(result["losses"]):
            if loss is None or not _close(loss, right_losses[step]):
                shown = "nothing" if loss is None else f"{loss:.10g}"
                near = loss is not None and abs(loss / right_losses[step] - 1) < 1e-6
                hint = "\nIs there a float32 tensor on the way?" if near else ""
                raise Wrong(
                    f"{case}: step {step + 1} returns {shown}; the mean loss over the tokens of "
                    f"all ranks is {right_losses[step]:.10g}.{hint}"
                )


def _reason(result: dict, step: int, size: int, clipped: bool) -> str:
    """What the first step's change tells about the mistake."""
    start = _flat(tiny_model.new_model().parameters())
    did, should = result["weights"][0] - start, result["alone"][0][0] - start
    if step:
        return "Step 1 was right: is everything reset for the next step?"
    if _close(did, result["means"][0] - start):
        return "It is the mean of the micro-batches' means: short ones weigh too much."
    if not did.any():
        return "They have not changed: is optimizer.step() called, with gradients still there?"
    ratio = (did @ should / (should @ should)).item()
    if _close(did, ratio * should) and size > 1:
        factor = f"The change is {ratio:.3g} times the right one: "
        return factor + "DDP takes the mean over the ranks, and you need a sum over tokens."
    if clipped:
        return "Without clipping it was right: clip once, the accumulated gradient of all ranks."
    return "Does every micro-batch count, each token with the same weight?"
