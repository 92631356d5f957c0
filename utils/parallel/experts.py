"""Expert parallelism: the experts of each MoE layer are split over ranks, and tokens travel.

    expert_parallel(model, mesh.ep)         in place; rank r keeps its experts
    logits = model(x)                       x: this rank's own rows, as in data parallelism

Every rank routes its own tokens. An all-to-all brings each token to the ranks that hold its
experts, a second one brings the results back, and both are reversed in the backward pass (GShard,
arXiv:2006.16668). Nothing is padded and nothing is dropped: each pair of ranks exchanges exactly
the rows it has, after telling each other how many. A layer therefore performs

    forward    3 all-to-alls    the counts (one int64 per expert), the tokens, the results
    backward   2 all-to-alls    the gradients of the results, the gradients of the tokens

and a rank whose tokens choose other ranks' experts n times sends n · C values each time in one
direction. All ranks of the axis must call the model equally often.

The gradient of an expert is the *sum* over the axis's ranks, because all their tokens were computed
here. Where dense gradients are averaged over dp = edp · ep ranks, an expert's are averaged over edp
and also divided by ep.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from utils.models.moe import combine_rows, gather_rows, moe_layers, run_experts
from utils.parallel.mesh import Axis
from utils.shares import shares


def expert_shares(experts: int, ranks: int) -> tuple[int, ...]:
    """How many experts each rank keeps, in contiguous runs whose sizes differ by at most one.

    Raises ValueError if a rank would have none.
    """
    if experts < ranks:
        raise ValueError(
            f"{experts} experts cannot be split over {ranks} ranks: take --ep {experts} or less, "
            "or more experts"
        )
    return shares(experts, ranks)


def expert_parallel(model: nn.Module, axis: Axis) -> nn.Module:
    """Keep only this rank's experts of every MoE layer, in place; return the model.

    model   a GPT, a pipeline stage of it, or any module with `utils.models.moe.MoE` layers
    axis    `mesh.ep`

    Parameters keep their names (`….experts.5.w1.weight`); other ranks' experts are removed.
    Raises ValueError if the axis has several ranks and the model no experts.
    """
    layers = moe_layers(model)
    if axis.size > 1 and not layers:
        raise ValueError(
            f"--ep {axis.size} splits experts, but the model has none: add --experts"
        )
    for layer in layers if axis.size > 1 else ():
        counts = expert_shares(layer.count, axis.size)
        first = sum(counts[: axis.index])
        for index in range(layer.count):
            if not first <= index < first + counts[axis.index]:
                del layer.experts[str(index)]
        layer.compute = partial(compute_over, axis, counts)
    return model


def compute_over(
    axis: Axis,
    held: tuple[int, ...],
    experts: nn.ModuleDict,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Compute the same as `utils.models.moe.compute_here`, with the experts split over the axis.

    held     number of experts of each rank
    experts  this rank's, by name
    tokens   (S, C) of this rank; chosen and weights (S, k), where chosen indexes all experts
    """
    rows, order, counts = gather_rows(tokens, chosen, sum(held))
    arriving = exchange_counts(counts, held, axis)  # (ranks, own experts)
    sizes = [part.sum() for part in counts.split(held)]
    send, receive = torch.stack([torch.stack(sizes), arriving.sum(dim=1)]).tolist()

    arrived = AllToAll.apply(rows, send, receive, axis.group)  # by rank, then by expert
    by_expert = expert_order(arriving)
    loads = arriving.sum(dim=0).tolist()
    results = run_experts(experts, arrived.index_select(0, by_expert), loads)
    results = torch.empty_like(results).index_copy(0, by_expert, results)  # by rank again
    return combine_rows(AllToAll.apply(results, receive, send, axis.group), order, weights)


def exchange_counts(counts: torch.Tensor, held: tuple[int, ...], axis: Axis) -> torch.Tensor:
    """(ranks, own experts): how many rows each rank will send to each of this rank's experts.

    counts   (E,) rows of this rank for each expert
    """
    own = held[axis.index]
    arriving = counts.new_empty(axis.size * own)
    dist.all_to_all_single(arriving, counts, [own] * axis.size, list(held), group=axis.group)
    return arriving.view(axis.size, own)


def expert_order(arriving: torch.Tensor) -> torch.Tensor:
    """The order that sorts rows by expert when they arrived by rank, then by expert."""
    experts = torch.arange(arriving.shape[1], device=arriving.device)
    return experts.repeat(len(arriving)).repeat_interleave(arriving.flatten()).argsort(stable=True)


class AllToAll(torch.autograd.Function):
    """Forward: send `send[r]` rows to rank r, receive `receive[r]` from it. Backward: the reverse.

    rows (sum(send), C) -> (sum(receive), C); those for rank 0 come first.
    """

    @staticmethod
    def forward(
        ctx,
        rows: torch.Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(rows, send, receive, group):
    arrived = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
    return arrived
