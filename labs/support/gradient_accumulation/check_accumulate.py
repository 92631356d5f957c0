"""Given: what the check cell of exercise 02a looks at.

1, 2 and 3 real ranks make two steps with your functions, on micro-batches of unequal length. The
gradients must equal those of one rank with the whole batch; `utils.measure.traffic` counts the
messages, and autograd's hooks for saved tensors tell how much the forward passes keep at the same
time.
"""

import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from labs.support.gradient_accumulation import tiny_model
from utils.course.checks import Wrong, on_ranks
from utils.measure.traffic import Traffic

STEPS, LR = 2, 0.5
# How many tokens count in each row of each micro-batch: a list for each rank. One micro-batch is
# all padding; the third rank has none at all in the first step.
SHARES = [
    [[[7, 6, 7], [1], [2, 3]], [[4, 4], [0, 0], [7]], []],
    [[[5], [7, 7, 7, 7]], [[1], [1], [1], [1]], [[3, 3], [6]]],
]


def accumulation(path: Path) -> str:
    """Judges `accumulate` and `reduce_once` in the file."""
    for size in (1, 2, 3):
        results = on_ranks(size, path, _train, hang="Do all ranks call the all-reduce, each once?")
        for step in range(STEPS):
            for rank, result in enumerate(results):
                case = f"with {size} ranks, rank {rank}, step {step + 1}"
                _right_sums(result[step], case)
            for rank, result in enumerate(results):
                case = f"with {size} ranks, rank {rank}, step {step + 1}"
                _right_messages(result[step], case)
                _right_gradient(result[step], size, case)
                _right_memory(result[step], case)
    return (
        "the gradient of the mean over all tokens, equal to one rank's on 1, 2 and 3 ranks;\n"
        "padding, an empty micro-batch and a rank without any change nothing;\n"
        "one all-reduce a step for everything, and the activations of one micro-batch at a time."
    )


class _Kept:
    """Stands for a tensor that autograd keeps; it dies with the graph."""

    def __init__(self, tensor):
        self.tensor = tensor


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """Follows the bytes that forward passes keep: now, and at most."""

    def __init__(self):
        self.now = self.most = 0
        super().__init__(self._pack, lambda kept: kept.tensor)

    def __enter__(self):
        super().__enter__()
        return self

    def _pack(self, tensor):
        kept = _Kept(tensor)
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(kept, self._free, tensor.nbytes)
        return kept

    def _free(self, size):
        self.now -= size


def _shares(step: int, size: int) -> list[list[tiny_model.MicroBatch]]:
    """The micro-batches of each rank."""
    lengths = SHARES[step][:size]
    return [tiny_model.micro_batches(10 * step + rank, lengths[rank]) for rank in range(size)]


def _flat(grads) -> torch.Tensor:
    return torch.cat([grad.flatten() for grad in grads])


def _gradient(model, shares) -> tuple[torch.Tensor, float]:
    """The gradient and the value of the summed loss of all micro-batches, a token."""
    batches = [batch for share in shares for batch in share]
    loss = sum(tiny_model.loss_sum(model, x, y) for x, y in batches)
    loss = loss / sum(tiny_model.counted(y) for _, y in batches)
    return _flat(torch.autograd.grad(loss, list(model.parameters()))), loss.item()


def _mean_of_means(model, shares) -> torch.Tensor:
    """What comes out when each micro-batch's mean weighs the same."""
    batches = [(x, y) for share in shares for x, y in share if tiny_model.counted(y)]
    means = [tiny_model.loss_sum(model, x, y) / tiny_model.counted(y) for x, y in batches]
    return _flat(torch.autograd.grad(sum(means) / len(means), list(model.parameters())))


def _train(answer) -> list[dict]:
    """On a rank: the steps, and beside each what one rank would have."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, results = tiny_model.new_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        shares = _shares(step, size)
        right, right_loss = _gradient(model, shares)
        result = {"right": right, "right_loss": right_loss}
        result["means"] = _mean_of_means(model, shares)
        result["tokens"] = sum(tiny_model.counted(y) for share in shares for _, y in share)
        result["padded"] = sum(y.numel() for share in shares for _, y in share)
        mine = shares[rank]
        result["own_tokens"] = sum(tiny_model.counted(y) for _, y in mine)
        result["one"] = max((_kept(model, *batch) for batch in mine), default=0)
        optimizer.zero_grad()
        with Traffic() as before, _Saved() as saved:
            sums = answer.accumulate(model, mine)
        if not isinstance(sums, tuple) or len(sums) != 2:
            return [{"returned": repr(sums)}] * STEPS
        losses, tokens = (getattr(value, "item", lambda v=value: v)() for value in sums)
        result["sums"], result["early"] = (losses, tokens), before.calls()
        result["kept"] = saved.most
        with Traffic() as traffic:
            loss = answer.reduce_once(model, losses, tokens)
        result["events"] = [(event.op, event.payload) for event in traffic.events]
        result["loss"] = None if loss is None else float(loss)
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        result["missing"] = missing
        result["grad"] = None if missing else _flat(p.grad for p in model.parameters())
        result["own_loss"] = sum(tiny_model.loss_sum(model, x, y).item() for x, y in mine)
        if missing:
            return [*results, result] * STEPS
        optimizer.step()
        results.append(result)
    return results


def _kept(model, x, y) -> int:
    """Bytes that the forward pass of one micro-batch keeps."""
    with _Saved() as saved:
        loss = tiny_model.loss_sum(model, x, y)
    del loss
    return saved.most


def _close(a, b) -> bool:
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (a, b))
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def _parallel(a, b) -> bool:
    return _close(a * b.norm(), b * a.norm())


def _right_sums(result: dict, case: str) -> None:
    if "returned" in result:
        raise Wrong(
            f"{case}: accumulate returns {result['returned']}: two numbers, (losses, tokens)."
        )
    if result["early"]:
        raise Wrong(
            f"{case}: accumulate communicates ({result['early']} calls).\n"
            "Nobody needs the sums before the last micro-batch: leave it to reduce_once."
        )
    losses, tokens = result["sums"]
    if tokens != result["own_tokens"]:
        more = tokens > result["own_tokens"]
        hint = "\nPadding (the target -100) does not count." if more else ""
        raise Wrong(
            f"{case}: accumulate counts {tokens:g} tokens, this rank's micro-batches have "
            f"{result['own_tokens']}.{hint}"
        )
    if not losses == losses:
        raise Wrong(f"{case}: the loss is nan: a micro-batch may have no token that counts.")
    if not _close(losses, result["own_loss"]):
        raise Wrong(
            f"{case}: accumulate returns the loss {losses:.6g}; the sum over this rank's tokens "
            f"is {result['own_loss']:.6g}.\nA sum, not a mean: every token weighs the same."
        )


def _right_messages(result: dict, case: str) -> None:
    ops = [op for op, _ in result["events"]]
    other = sorted(set(ops) - {"all_reduce"})
    if other:
        raise Wrong(f"{case}: reduce_once calls {', '.join(other)}; one all-reduce is enough.")
    if len(ops) != 1:
        raise Wrong(
            f"{case}: {len(ops)} all-reduces in a step, where one is enough:\n"
            "put the gradients, the loss and the number of tokens into one tensor."
        )
    most = result["right"].nbytes + 16
    if result["events"][0][1] > most:
        raise Wrong(
            f"{case}: an all-reduce of {result['events'][0][1]:,} bytes; the gradients and two "
            f"numbers are {most:,}."
        )


def _right_gradient(result: dict, size: int, case: str) -> None:
    if result["missing"]:
        raise Wrong(
            f"{case}: {', '.join(result['missing'])} still have no gradient.\n"
            "A rank without micro-batches starts from zeros, and gets the sum like all others."
        )
    grad, right, tokens = result["grad"], result["right"], result["tokens"]
    if not _close(grad, right):
        if _parallel(grad, result["means"]):
            hint = "It adds up the micro-batches' means: the tokens of short ones weigh too much."
        elif _close(grad, right * tokens):
            hint = f"It is {tokens} times the right one, as many as there are tokens: divide."
        elif _close(grad, right * tokens / size):
            hint = "The sum is divided by the number of ranks, not by the number of tokens."
        elif _close(grad, right * tokens / result["padded"]):
            hint = "The sum is divided by all positions: padding does not count."
        elif result["own_tokens"] and _close(grad, right * tokens / result["own_tokens"]):
            hint = "It is divided by the tokens of this rank, not by those of all ranks."
        else:
            hint = "Are all numbers copied back to the parameters that they came from?"
        raise Wrong(f"{case}: the gradient differs from that of the whole batch.\n{hint}")
    loss = result["loss"]
    if loss is None or not _close(loss, result["right_loss"]):
        shown = "nothing" if loss is None else f"{loss:.10g}"
        near = loss is not None and abs(loss / result["right_loss"] - 1) < 1e-6
        hint = "\nIs there a float32 tensor on the way? The gradients are float64." if near else ""
        raise Wrong(
            f"{case}: reduce_once returns {shown}; the mean loss over the tokens of all ranks is "
            f"{result['right_loss']:.10g}.{hint}"
        )


def _right_memory(result: dict, case: str) -> None:
    if result["kept"] > 1.1 * result["one"]:
        raise Wrong(
            f"{case}: at one moment {result['kept']:,} bytes are kept for backward passes; the "
            f"largest micro-batch alone needs {result['one']:,}.\n"
            "Call backward for each micro-batch, before the next one's forward pass."
        )
