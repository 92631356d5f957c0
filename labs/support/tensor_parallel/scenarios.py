"""Given: what the ranks do for a check: run your layer beside the whole one."""

import copy

import torch
import torch.distributed as dist

from utils.measure.traffic import Traffic
from utils.models.gpt import MLP, Attention, GPTConfig, cross_entropy, rotary_tables
from utils.shares import shares

# sizes that 2 and 3 do not divide; biases, which are easily added too often
CONFIG = GPTConfig(
    vocab_size=29, hidden_size=24, layers=1, heads=6, kv_heads=3, intermediate_size=19,
    attention_bias=True, mlp_bias=True,
)  # fmt: skip
B, T = 2, 5


def _all(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of every rank, (N, …)."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return torch.stack(rows)


def pair(answer) -> dict:
    """On a rank: what Enter and Leave do to numbers that differ from rank to rank."""
    seen = {}
    for name in ("Enter", "Leave"):
        torch.manual_seed(dist.get_rank())
        x = torch.randn(3, 4, dtype=torch.float64).requires_grad_()
        dy = torch.randn(4, 3, dtype=torch.float64).t()  # as it may come: not contiguous
        before = x.detach().clone(), dy.clone()
        with Traffic() as forward:
            y = getattr(answer, name).apply(x)
        with Traffic() as backward:
            y.backward(dy)
        seen[name.lower()] = {
            "x": before[0], "y": y.detach().clone(), "dy": before[1], "dx": x.grad,
            "x changed": not torch.equal(x, before[0]),
            "dy changed": not torch.equal(dy, before[1]),
            "sum of x": _all(before[0]).sum(0), "sum of dy": _all(before[1]).sum(0),
            "forward": forward.calls(), "backward": backward.calls(),
            "payload": backward.payload(),
        }  # fmt: skip
    return seen


def sizes(answer) -> dict:
    """On a rank: what head_sizes says for 10 query heads and 5 key-value heads of 4 values."""
    mine = shares(5, dist.get_world_size())
    right = tuple(8 * share for share in mine), tuple(4 * share for share in mine)
    got = tuple(tuple(sizes) for sizes in answer.head_sizes(10, 5, 4))
    return {"asked": (10, 5, 4), "got": got, "right": right}


def layer(answer, name: str) -> dict:
    """On a rank: the parallel layer beside the whole one."""
    torch.manual_seed(0)
    kind = MLP if name == "ParallelMLP" else Attention
    whole = kind(CONFIG).double()
    x = torch.randn(B, T, CONFIG.hidden_size, dtype=torch.float64)
    dy = torch.randn_like(x)
    more = ()
    if kind is Attention:
        cos, sin = rotary_tables(CONFIG, torch.arange(T), torch.float64)
        more = cos[:, None], sin[:, None]
    parallel = getattr(answer, name)(copy.deepcopy(whole))
    right_parts = _right_parts(kind)
    seen = {"parts": {}, "bytes of x": x.numel() * 8}
    for matrix, (dim, lengths) in right_parts.items():
        weight = getattr(parallel, matrix).weight
        right = _part(getattr(whole, matrix).weight, dim, lengths)
        seen["parts"][matrix] = {
            "shape": tuple(weight.shape), "right shape": tuple(right.shape),
            "equal": weight.shape == right.shape and torch.equal(weight, right),
            "bytes": weight.untyped_storage().nbytes(),
        }  # fmt: skip
    wrong = any(part["shape"] != part["right shape"] for part in seen["parts"].values())
    if bool(_all(torch.tensor(wrong)).any()):  # on some rank it could not run
        return seen
    return seen | _run(whole, parallel, right_parts, x, dy, more)


def _right_parts(kind) -> dict:
    """{matrix: (dimension that is cut, length of each rank's part)}"""
    size = dist.get_world_size()
    if kind is MLP:
        lengths = shares(CONFIG.mlp_size, size)
        return {"gate_proj": (0, lengths), "up_proj": (0, lengths), "down_proj": (1, lengths)}
    keys = tuple(share * CONFIG.head_size for share in shares(CONFIG.key_value_heads, size))
    queries = tuple(length * CONFIG.heads // CONFIG.key_value_heads for length in keys)
    return {"q_proj": (0, queries), "k_proj": (0, keys), "v_proj": (0, keys),
            "o_proj": (1, queries)}  # fmt: skip


def _part(tensor, dim, lengths):
    return tensor.detach().split(list(lengths), dim=dim)[dist.get_rank()]


def _run(whole, parallel, right_parts, x, dy, more) -> dict:
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = whole(a, *more)
    expected.backward(dy)
    with Traffic() as forward:
        y = parallel(b, *more)
    with Traffic() as backward:
        y.backward(dy)
    last = list(right_parts)[-1]
    bias = getattr(whole, last).bias
    excess = y.detach() - expected.detach()
    everyone = _all(y.detach())
    errors = {}
    for matrix, (dim, lengths) in right_parts.items():
        right = _part(getattr(whole, matrix).weight.grad, dim, lengths)
        errors[f"{matrix}.weight"] = _error(getattr(parallel, matrix).weight.grad, right)
        right = getattr(whole, matrix).bias.grad
        right = right if dim == 1 else _part(right, 0, lengths)
        errors[f"{matrix}.bias"] = _error(getattr(parallel, matrix).bias.grad, right)
    multiples = [-1.0, *range(1, dist.get_world_size())]  # the bias is missing, or there too often
    return {
        "y error": excess.abs().max().item(),
        "y error without bias": min((excess - n * bias).abs().max().item() for n in multiples),
        "differs between ranks": bool((everyone - everyone[0]).abs().max() > 1e-9),
        "dx error": _error(b.grad, a.grad),
        "gradient errors": errors,
        "forward": (forward.calls(), forward.payload()),
        "backward": (backward.calls(), backward.payload()),
    }


def _error(tensor, right) -> float:
    if tensor is None:
        return float("inf")
    return (tensor - right).abs().max().item()


def loss(answer) -> dict:
    """On a rank: the loss of small logits, and of logits whose exp overflows."""
    lengths = shares(CONFIG.vocab_size, dist.get_world_size())
    torch.manual_seed(0)
    targets = torch.randint(CONFIG.vocab_size, (B, T))
    seen = {}
    for name, scale in (("small logits", 2.0), ("large logits", 2000.0)):
        logits = scale * torch.randn(B, T, CONFIG.vocab_size, dtype=torch.float64)
        whole = logits.clone().requires_grad_()
        right = cross_entropy(whole, targets)
        right.backward()
        own = _part(logits, 2, lengths).clone().requires_grad_()
        with Traffic() as traffic:
            value = answer.vocabulary_loss(own, targets, lengths)
            value.backward()
        expected = _part(whole.grad, 2, lengths)
        # what comes out if each rank subtracts the largest of its own logits
        parts = logits.split(list(lengths), dim=2)
        less = logits - torch.cat([p.amax(-1, True).expand_as(p) for p in parts], dim=-1)
        own_largest = less.exp().sum(-1).log() - less.gather(-1, targets[..., None])[..., 0]
        seen[name] = {
            "loss": value.item(), "right": right.item(), "tokens": targets.numel(),
            "gradient error": _error(own.grad, expected),
            "factor": (own.grad.norm() / expected.norm()).item() if own.grad is not None else 0.0,
            "largest is own": abs(value.item() - own_largest.mean().item()) < 1e-6,
            "calls": traffic.calls(), "payload": traffic.payload(),
        }  # fmt: skip
    return seen
