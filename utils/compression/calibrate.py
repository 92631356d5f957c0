"""Calibration: statistics of a model's activations on some text, and the methods that use them.

    seen = observe(model, rows)                    # {first reader of an input: Inputs}
    seen[name].largest, seen[name].gram            # per channel; XᵀX over all tokens
    scales = static_scales(seen, percentile=99.9)  # of activations, one per input
    smoother = smooth(model, seen)                 # SmoothQuant: outliers move into the weights
    q = gptq(weight, seen[name].gram, INT4)        # GPTQ: each column corrects earlier errors

Shapes: X (T, K), T tokens, K channels of one input.
"""

import copy
from dataclasses import dataclass

import torch

from utils.compression.matrices import READERS, matrices
from utils.compression.quantize import INT8, Quantized, Scheme, quantize, ranges
from utils.models.gpt import GPT

KEPT = 1024  # rows of an input that are kept (or slightly more), for percentiles


@dataclass
class Inputs:
    """Statistics of one input X, which one or more matrices read.

    largest   max|X_j| of each channel (K,)
    gram      XᵀX, fp32 (K, K)
    rows      a sample of the rows of X (about KEPT, K)
    """

    largest: torch.Tensor
    gram: torch.Tensor
    rows: torch.Tensor


@torch.no_grad()
def observe(model: GPT, tokens: torch.Tensor, batch: int = 8) -> dict[str, Inputs]:
    """{name: Inputs} over tokens (B, T), named after the first matrix that reads the input (q_proj
    also for k and v, gate_proj also for up_proj)."""
    seen: dict[str, Inputs] = {}
    each = -(-KEPT // -(-len(tokens) // batch))  # rows kept per batch

    def look(name):
        def hook(module, inputs):
            x = inputs[0].flatten(0, -2).float()  # (B·T, K)
            some = x[torch.linspace(0, len(x) - 1, min(each, len(x))).long()]
            largest, gram = x.abs().amax(dim=0), x.T @ x
            if old := seen.get(name):
                largest, gram = torch.maximum(largest, old.largest), gram.add_(old.gram)
                some = torch.cat((old.rows, some))
            seen[name] = Inputs(largest, gram, some)

        return hook

    hooks = [
        linear.register_forward_pre_hook(look(name))
        for name, linear in matrices(model).items()
        if name.endswith(tuple(READERS))
    ]
    try:
        for start in range(0, len(tokens), batch):
            model.model(tokens[start : start + batch])
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def static_scales(
    seen: dict[str, Inputs], percentile: float | None = None
) -> dict[str, torch.Tensor]:
    """{name: scale} of activations in 8 bits, one value per input.

    percentile   of all |x|, where the range ends; larger values are clipped. None: the maximum
    """
    scales = {}
    for name, inputs in seen.items():
        largest = inputs.largest.max()
        if percentile is not None:
            sizes = inputs.rows.abs().flatten()
            kept = max(1, round(len(sizes) * percentile / 100))
            largest = sizes.kthvalue(kept).values
        scales[name] = largest / INT8.highest
    return scales


@torch.no_grad()
def smooth(model: GPT, seen: dict[str, Inputs], alpha: float = 0.5) -> GPT:
    """An equivalent copy whose inputs have smaller outliers (SmoothQuant, Xiao et al.,
    arXiv:2211.10438).

    Channel j of a norm's output is divided by s_j, in the norm's own weight, and column j of each
    matrix that reads it is multiplied by s_j = max|X_j|^alpha / max|W_j|^(1 − alpha). The inputs of
    o and down do not come from a norm and stay unchanged.
    """
    copied = copy.deepcopy(model)
    for number, block in enumerate(copied.model.layers):
        for first, norm in (
            ("self_attn.q_proj", block.input_layernorm),
            ("mlp.gate_proj", block.post_attention_layernorm),
        ):
            readers = [block.get_submodule(name).weight for name in READERS[first]]
            inputs = seen[f"model.layers.{number}.{first}"].largest
            weights = torch.cat(readers).abs().amax(dim=0)  # (K,)
            s = inputs**alpha / weights ** (1 - alpha)
            s = s.where((inputs > 0) & (weights > 0), 1.0)  # a dead channel stays unchanged
            norm.weight /= s
            for weight in readers:
                weight *= s
    return copied


@torch.no_grad()
def gptq(
    weight: torch.Tensor, gram: torch.Tensor, scheme: Scheme, damping: float = 0.01
) -> Quantized:
    """W (N, K) in integers that keep X·Wᵀ, rather than W, close (GPTQ, Frantar et al.,
    arXiv:2210.17323).

    Columns are rounded one by one, and each error in the output is compensated as well as possible
    by the columns not yet rounded, using the rows of the Cholesky factor of (XᵀX)⁻¹.

    gram      XᵀX (K, K) of the inputs in the unrounded model, whereas the paper uses a model whose
              earlier layers have already been rounded
    damping   fraction of the diagonal's mean that is added to the diagonal, for invertibility
    """
    w, K = weight.double().clone(), weight.shape[1]
    plain = quantize(weight, scheme)
    hessian = gram.double().clone()
    hessian += torch.eye(K, dtype=torch.double) * max(damping * hessian.diag().mean(), 1e-12)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)  # (K, K)
    size = scheme.columns_of_a_scale(K)
    values, scales, zeros = torch.empty_like(plain.values), [], []
    for start in range(0, K, size):
        group = slice(start, start + size)
        if scheme.per == "group":  # scales of the weights as corrected so far
            scale, zero = ranges(w[:, group], scheme)
        else:
            scale, zero = plain.scale, plain.zero_point
        scales.append(scale)
        zeros.append(zero)
        for j in range(start, min(start + size, K)):
            moved = w[:, j : j + 1] / scale + (0 if zero is None else zero)
            q = moved.round().clamp(scheme.lowest, scheme.highest)
            values[:, j] = q[:, 0].to(torch.int8)
            back = (q - (0 if zero is None else zero)) * scale
            error = (w[:, j : j + 1] - back) / upper[j, j]  # (N, 1)
            w[:, j:] -= error * upper[j, j:]
    zero_point = None if scheme.symmetric else torch.cat(zeros, dim=1)
    return Quantized(values, torch.cat(scales, dim=1), zero_point, scheme)
