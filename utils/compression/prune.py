"""Pruning: setting weights to zero, and removing whole heads, columns and layers.

    largest(w, keep=0.5)                       # magnitude: zeros anywhere
    two_of_four(w.abs())                       # two of every four neighbours, as GPUs support
    wanda(w, seen[first_reader(name)])         # |w|·‖x‖ instead of |w|
    head_importance(model, rows)               # (layers, H)
    without_heads(model, keep), without_columns(model, keep), without_layers(model, [4, 6])

A mask alone saves nothing: a zero takes as many bytes as any other value and is multiplied like
one, unless hardware or a file format skips it (2:4 on NVIDIA's tensor cores since Ampere: Mishra et
al., arXiv:2104.08378). Structured pruning gives a smaller, dense model of the same layout, which
any program runs as fast as its size allows.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from utils.compression.calibrate import Inputs
from utils.models.gpt import GPT, cross_entropy

# ---- zeros


def largest(scores: torch.Tensor, keep: float) -> torch.Tensor:
    """A mask of the largest `keep` (0 to 1) of all scores."""
    count = round(keep * scores.numel())
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[scores.flatten().topk(count).indices] = True
    return mask.view(scores.shape)


def two_of_four(scores: torch.Tensor) -> torch.Tensor:
    """A mask of the two largest of every four neighbours in a row of scores (N, K)."""
    if scores.shape[1] % 4:
        raise ValueError(f"{scores.shape[1]} columns cannot be divided into groups of four")
    groups = scores.view(len(scores), -1, 4)
    mask = torch.zeros_like(groups, dtype=torch.bool)
    return mask.scatter_(2, groups.topk(2, dim=2).indices, True).view(scores.shape)


def wanda(weight: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Scores (N, K): |w_ij| · ‖x_j‖ (Sun et al., arXiv:2306.11695)."""
    return weight.abs() * inputs.gram.diag().sqrt()


# ---- importance


def head_importance(model: GPT, rows: torch.Tensor) -> torch.Tensor:
    """(layers, H): the sensitivity of the loss of rows (B, T) to scaling a head's output, |∂L/∂ξ|
    summed over rows (Michel et al., arXiv:1905.10650, equation 2)."""
    return _importance(model, rows, "self_attn.o_proj", model.config.head_size)


def column_importance(model: GPT, rows: torch.Tensor) -> torch.Tensor:
    """(layers, M): the same for the columns inside the MLP."""
    return _importance(model, rows, "mlp.down_proj", 1)


def _importance(model, rows, name, width):
    """Sensitivity to factors of 1, separate for each row, on groups of `width` input channels."""
    factors = []

    def hook(module, args):
        x = args[0].unflatten(-1, (-1, width))  # (B, T, groups, width)
        factors.append(torch.ones(len(x), 1, x.shape[2], 1, requires_grad=True))
        return ((x * factors[-1]).flatten(-2),)

    hooks = [
        block.get_submodule(name).register_forward_pre_hook(hook) for block in model.model.layers
    ]
    try:
        loss = cross_entropy(model(rows[:, :-1]), rows[:, 1:], reduction="sum")
    finally:
        for one in hooks:
            one.remove()
    felt = torch.autograd.grad(loss / rows[:, 1:].numel(), factors)
    return torch.stack([grad.abs().sum(dim=(0, 1, 3)) for grad in felt])


@torch.no_grad()
def layer_importance(model: GPT, rows: torch.Tensor) -> list[float]:
    """For each layer: the loss of rows (B, T) without it, in nats per token."""
    losses = []
    for number in range(model.config.layers):
        logits = without_layers(model, [number])(rows[:, :-1])
        losses.append(cross_entropy(logits, rows[:, 1:]).item())
    return losses


# ---- smaller models


def without_heads(model: GPT, keep: Sequence[Sequence[int]]) -> GPT:
    """A copy with only these heads in each layer, each with its key and value.

    Raises ValueError if the layers would differ in number, or heads share keys and values.
    """
    config = model.config
    if config.heads != config.key_value_heads:
        raise ValueError(
            f"{config.heads} heads share {config.key_value_heads} key-value heads: prune a model "
            "in which each head has its own"
        )
    count = _equally_many([len(heads) for heads in keep], "heads")
    channels = [
        torch.cat(
            [torch.arange(config.head_size) + head * config.head_size for head in sorted(heads)]
        )
        for heads in keep
    ]
    return _smaller(
        model,
        {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1},
        channels,
        heads=count,
        kv_heads=count,
    )


def without_columns(model: GPT, keep: Sequence[torch.Tensor]) -> GPT:
    """A copy whose MLPs have only these columns in each layer, the same number in all layers."""
    count = _equally_many([len(columns) for columns in keep], "columns")
    chosen = [columns.sort().values for columns in keep]
    cuts = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
    return _smaller(model, cuts, chosen, intermediate_size=count)


def without_layers(model: GPT, numbers: Sequence[int]) -> GPT:
    """A copy without these layers."""
    kept = [number for number in range(model.config.layers) if number not in numbers]
    if not kept or len(kept) + len(set(numbers)) != model.config.layers:
        raise ValueError(f"cannot remove layers {list(numbers)} from {model.config.layers}")
    places = {str(number): str(place) for place, number in enumerate(kept)}
    state = {}
    for name, tensor in model.state_dict().items():
        before, layers, rest = name.partition("model.layers.")
        number, _, module = rest.partition(".")
        if not layers:
            state[name] = tensor.clone()
        elif number in places:
            state[f"{before}{layers}{places[number]}.{module}"] = tensor.clone()
    return _of(model, state, layers=len(kept))


def _smaller(model, cuts, chosen, **sizes):
    """A copy that keeps, of the matrices in `cuts` {module: dimension} and their biases, only the
    indices that `chosen` gives for each layer."""
    state = {}
    for name, tensor in model.state_dict().items():
        *path, module, kind = name.split(".")
        if module in cuts and not (kind == "bias" and cuts[module] == 1):
            tensor = tensor.index_select(cuts[module], chosen[int(path[2])])
        state[name] = tensor.clone()
    return _of(model, state, **sizes)


def _of(model, state, **sizes):
    config = replace(model.config, head_dim=model.config.head_size, **sizes)
    smaller = GPT.without_memory(config)
    smaller.load_state_dict(state, assign=True)
    smaller.tie()
    return smaller.requires_grad_(True).train(model.training)


def _equally_many(counts, what):
    if len(set(counts)) != 1 or not counts[0]:
        raise ValueError(f"layers keep {counts} {what}: all must keep the same number, at least 1")
    return counts[0]
