"""Mixture of experts: many MLPs instead of one, of which each token uses a few.

    layer = MoE(GPTConfig(hidden_size=64, experts=8, experts_per_token=2))
    y = layer(x)                            # (B, T, C) -> (B, T, C)
    layer.counts                            # (E,) number of choices of each expert
    layer.balance_loss                      # 1.0 if all experts are used equally

For each token the router (`gate`) gives every expert a probability; the k most likely experts
compute the token, and their results are summed, weighted by their normalized probabilities. Layout
and parameter names are those of Mixtral's checkpoints (arXiv:2401.04088).

Quantities that depend on several tokens, capacity and balance loss, are computed separately for
each sequence (the groups of GShard, arXiv:2006.16668, 2.2). It therefore does not matter on which
rank or in which micro-batch a sequence is computed.

Shapes: B sequences, T positions, C hidden size, S = B·T tokens, E experts, k choices per token.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from utils.models.config import GPTConfig

# ---- 1. the router's choice


def choose(
    logits: torch.Tensor, count: int, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(chosen, weights, probabilities) for router logits (..., E).

    chosen         (..., k) int64, the most likely expert first; k = count
    weights        (..., k), which sum to 1 for each token
    probabilities  (..., E) of all experts
    bias           (E,) or None: added to the probabilities for the choice, not for the weights
                   (arXiv:2408.15664)
    """
    probabilities = logits.softmax(dim=-1)
    chosen = (probabilities if bias is None else probabilities + bias).topk(count, dim=-1).indices
    weights = probabilities.gather(-1, chosen)
    return chosen, weights / weights.sum(dim=-1, keepdim=True), probabilities


def capacity_of(tokens: int, count: int, experts: int, factor: float) -> int:
    """How many of a sequence's choices one expert accepts: factor · T·k/E, rounded up."""
    return math.ceil(factor * tokens * count / experts)


def within_capacity(chosen: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
    """Which choices (B, T, k) are accepted, bool: each expert takes `capacity` per sequence.

    First choices come before second ones, earlier tokens before later ones.
    """
    order = chosen.transpose(1, 2).flatten(1)  # (B, k·T): all first choices, then all second ones
    taken = F.one_hot(order, experts).cumsum(dim=1)  # per expert, including this choice
    place = taken.gather(-1, order[..., None]).squeeze(-1)  # (B, k·T), from 1
    return (place <= capacity).unflatten(1, (chosen.shape[2], -1)).transpose(1, 2)


def balance_loss(
    probabilities: torch.Tensor,
    chosen: torch.Tensor,
    over_sequence: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """How unevenly the sequences use the experts: E · Σ_e f_e · P_e, averaged over sequences.

    probabilities  (B, T, E); P_e is their mean over a sequence
    chosen         (B, T, k); f_e is the fraction of a sequence's choices that went to expert e

    over_sequence  sums a tensor over the ranks that split each sequence's positions: the result is
                   then this rank's share of the loss, and the shares add up to it

    1 if all experts are used equally, E if all tokens choose one expert (Switch Transformer,
    arXiv:2101.03961, 2.2; per sequence: DeepSeek-V3, arXiv:2412.19437, 2.1.2). f_e has no gradient;
    P_e does, and lowers the probability of overused experts.
    """
    experts = probabilities.shape[-1]
    used = F.one_hot(chosen, experts).to(probabilities.dtype)  # (B, T, k, E)
    if over_sequence is None:
        return experts * (used.mean(dim=(1, 2)) * probabilities.mean(dim=1)).sum(dim=-1).mean()
    counts = over_sequence(used.sum(dim=(1, 2)))  # (B, E), k·T per whole sequence
    choices = counts.sum(dim=-1, keepdim=True)
    mean = probabilities.sum(dim=1) * chosen.shape[-1] / choices  # this rank's share of it
    return experts * (counts / choices * mean).sum(dim=-1).mean()


# ---- 2. tokens to experts and back


def gather_rows(
    tokens: torch.Tensor, chosen: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows that the experts compute: each token once per choice, those of expert 0 first.

    tokens (S, C), chosen (S, k); a choice that is `experts` or more is dropped.
    Returns rows (n, C); order (n,), the choice behind each row, as an index into (S·k); and
    counts (E,), the rows of each expert.
    """
    choices = chosen.flatten()  # (S·k)
    counts = torch.bincount(choices, minlength=experts + 1)[:experts]
    order = choices.argsort(stable=True)
    if bool((choices >= experts).any()):
        order = order[: int(counts.sum())]  # dropped choices come last
    return tokens.index_select(0, order // chosen.shape[1]), order, counts


def combine_rows(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts' results (n, C), weighted and summed per token: (S, C)."""
    places = rows.new_zeros(weights.numel(), rows.shape[1])  # (S·k, C); dropped choices stay 0
    places = places.index_copy(0, order, rows).unflatten(0, weights.shape)  # (S, k, C)
    return (places * weights.to(rows.dtype)[..., None]).sum(dim=1)


def run_experts(experts: nn.ModuleDict, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Run each expert on its own rows (n, C), which are sorted by expert.

    An expert without rows is called too, so that its gradients are zeros and not None, for which
    an all-reduce of gradients would wait forever.
    """
    parts = rows.split(counts)
    return torch.cat([expert(part) for expert, part in zip(experts.values(), parts, strict=True)])


def compute_here(
    experts: nn.ModuleDict, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """All experts on one rank: tokens (S, C) -> (S, C)."""
    rows, order, counts = gather_rows(tokens, chosen, len(experts))
    return combine_rows(run_experts(experts, rows, counts.tolist()), order, weights)


# ---- 3. the layer


class Expert(nn.Module):
    """A SwiGLU MLP under Mixtral's names: w2(silu(w1(x)) * w3(x))."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.w2 = nn.Linear(config.mlp_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.mlp_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # (n, C)


class MoE(nn.Module):
    """The experts of one block, and the router that assigns tokens to them.

    After a forward pass:
        counts        (E,) int64: choices of each expert in this pass, before any are dropped
        dropped       number of choices beyond the capacity
        balance_loss  see `balance_loss`; differentiable
    Attributes to set from outside:
        capacity_factor  None: every choice is computed; else see `capacity_of`
        balance_weight   see `set_balance`
        bias             (E,) or None, see `choose`
        compute          (experts, tokens, chosen, weights) -> (S, C): runs the experts on the
                         tokens, by `compute_here` or over several ranks
        over_sequence    None, or see `balance_loss` if ranks split each sequence's positions; then
                         there is no capacity
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.count, self.chosen_per_token = config.experts, config.experts_per_token
        self.gate = nn.Linear(config.hidden_size, config.experts, bias=False)
        # a dictionary, so that an expert keeps its name if a rank holds only some of them
        self.experts = nn.ModuleDict({str(index): Expert(config) for index in range(self.count)})
        self.capacity_factor, self.balance_weight, self.bias = None, 0.0, None
        self.compute, self.over_sequence = compute_here, None
        self.counts = self.dropped = self.balance_loss = None

    def __getstate__(self):
        """Exclude the results of a pass from copies, because copy.deepcopy would refuse them."""
        return {**super().__getstate__(), **dict.fromkeys(("counts", "dropped", "balance_loss"))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, weights, probabilities = choose(
            self.router_logits(x), self.chosen_per_token, self.bias
        )
        self.counts = torch.bincount(chosen.flatten(), minlength=self.count)
        self.balance_loss = balance_loss(probabilities, chosen, self.over_sequence)
        self.dropped = 0
        if self.capacity_factor is not None:
            room = capacity_of(x.shape[1], self.chosen_per_token, self.count, self.capacity_factor)
            kept = within_capacity(chosen, self.count, room)
            chosen, weights = chosen.where(kept, self.count), weights.where(kept, 0.0)
            self.dropped = int((~kept).sum())
        rows = (tensor.flatten(0, 1) for tensor in (x, chosen, weights))  # (S, …) each
        y = self.compute(self.experts, *rows)
        if self.balance_weight:
            if torch.compiler.is_compiling():  # code that raises is run uncompiled
                raise RuntimeError(
                    "call utils.models.gpt.keep_from_compiling(model) before torch.compile"
                )
            y = _WithLoss.apply(y, self.balance_loss, self.balance_weight * len(x))
        return y.view_as(x).to(x.dtype)

    def router_logits(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, E), in fp32 or higher: rounding would change which expert is chosen."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(_at_least_fp32(x), _at_least_fp32(self.gate.weight))


def _at_least_fp32(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _WithLoss(torch.autograd.Function):
    """Forward: y unchanged. Backward: its gradient unchanged, and `weight` for the loss.

    A loss inside the model is thus minimized without leaving the model, even in pipeline stages
    and recomputed blocks.
    """

    @staticmethod
    def forward(ctx, y, loss, weight):
        ctx.weight, ctx.format = weight, loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_full((), ctx.weight, dtype=ctx.format), None


# ---- 4. all layers of a model


def moe_layers(model: nn.Module) -> list[MoE]:
    """The MoE layers of a model, or of a part of it, in order."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def set_balance(model: nn.Module, weight: float) -> None:
    """Make all later backward passes also minimize the balance losses: each adds the gradient of
    `weight` times their sum over the sequences of its forward pass.

    Because it is a sum, it does not matter how a step's sequences are split over ranks and
    micro-batches. To add c times the mean balance loss, over all layers and sequences, to a loss
    that is the mean over a step's tokens, the weight is  c / layers / sequences of the step.
    """
    for layer in moe_layers(model):
        layer.balance_weight = weight


@torch.no_grad()
def move_bias(layer: MoE, counts: torch.Tensor, rate: float = 1e-3) -> None:
    """Balance without a loss: lower the bias of overused experts, so that they are chosen less.

    counts  (E,) choices of a whole step, summed over micro-batches and ranks
    Call it after each step (Wang et al. 2024, arXiv:2408.15664, algorithm 1).
    """
    counts = counts.double()
    step = rate * (counts.mean() - counts).sign()
    layer.bias = (torch.zeros_like(step) if layer.bias is None else layer.bias) + step


def is_expert(name: str) -> bool:
    """Whether a parameter of this name belongs to an expert."""
    return ".experts." in f".{name}"
