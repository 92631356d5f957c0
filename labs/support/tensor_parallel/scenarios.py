"""Given: what the ranks do for a check: run your layers, and look at what they do.

A case is a dictionary, drawn by check_layers.py or check_sequence.py; what is whole and right is
computed from the same case in float64, here too.
"""

import gc
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from utils.course.observe import Look
from utils.course.runner import fractions
from utils.measure.traffic import tensors_in
from utils.models.gpt import MLP, Attention, GPTConfig, RMSNorm, rotary_tables
from utils.shares import shares

# ---- a and e: functions of autograd


def tensor_of(case: dict, rank: int, part: str) -> torch.Tensor:
    """What a rank has of a case: numbers of its own, in the case's layout, shape and type."""
    given = case[part]
    shape, layout = given["shapes"][rank], given["layouts"][rank]
    dtype, seed = case["dtype"], given["seed"] + rank
    if layout == "transposed":
        numbers = fractions(seed, *shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
    elif layout == "expanded":
        numbers = fractions(seed, 1, dtype=dtype).expand(shape)
    elif layout == "a slice":
        numbers = fractions(seed, 2, *shape, dtype=dtype)[1]
    else:
        numbers = fractions(seed, *shape, dtype=dtype)
    odd_rank, odd = given["odd"]
    if rank == odd_rank and odd == "zeros":
        numbers = torch.zeros_like(numbers)
    elif rank == odd_rank and numbers.numel() and odd == "a NaN":
        numbers = numbers.clone()
        numbers[(0,) * len(shape)] = torch.nan
    return numbers


def functions(answer, cases: list[dict]) -> list[dict]:
    """On a rank: what the functions do to numbers that differ from rank to rank. All go forward,
    with gradients and without, and then all come back."""
    rank, found, running = dist.get_rank(), [], []
    with Look() as always:
        for case in cases:
            function = getattr(answer, case["function"])
            x, dy = tensor_of(case, rank, "x").requires_grad_(), tensor_of(case, rank, "dy")
            with Look(x=x) as forward:
                y = function.apply(x, *case["more"])
            same = tensor_of(case, rank, "x")
            with Look(x=same) as asking, torch.no_grad():
                asked = function.apply(same, *case["more"]).clone()
            running.append((x, dy, y, asked, forward, asking))
        for x, dy, y, asked, forward, asking in reversed(running):
            held = held_by(y)
            with Look(x=x, dy=dy) as backward:
                (dx,) = torch.autograd.grad(y, x, dy)
            found.insert(0, {
                "y": y.detach().clone(), "dx": dx.clone(), "asked": asked, "held": held,
                "forward": seen(forward), "backward": seen(backward), "asking": seen(asking),
                "spare": forward.spare(y) + backward.spare(dx),
            })
        del x, same, dy, y, dx, asked, forward, backward, asking
        running.clear()
    kept = always.kept(found)
    return [{**one, "kept": kept} for one in found]


def held_by(y: torch.Tensor) -> int:
    """Bytes of the tensors that the function of autograd that made `y` keeps."""
    node = y.grad_fn
    held = [*getattr(node, "saved_tensors", ()), *getattr(node, "__dict__", {}).values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(held))


def seen(look: Look) -> dict:
    """What a Look has seen, without the tensors."""
    return {
        "events": look.events,
        "largest": look.largest,
        "changed": look.changed(),
        "work": sum(product.multiplications for product in look.products),
    }


# ---- b, c and e: layers


class NormedMLP(MLP):
    """The MLP with the norm before it and the residual around it."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(self.norm(x))


KINDS = {"ParallelMLP": MLP, "ParallelAttention": Attention, "SequenceMLP": NormedMLP}


def whole_layer(case: dict) -> nn.Module:
    """The whole layer of a case, the same wherever it is made."""
    layer = KINDS[case["layer"]](case["config"])
    for i, parameter in enumerate(layer.parameters()):
        numbers = fractions(case["seed"] + i, *parameter.shape) / parameter.shape[-1] ** 0.5
        parameter.data = numbers.to(case["dtype"])
    return layer


def cuts(case: dict, size: int) -> dict[str, tuple[int, tuple[int, ...]] | None]:
    """{parameter: (dimension that is cut, length of each rank's part)}; None: all have it whole."""
    config, layer = case["config"], KINDS[case["layer"]]
    if layer is Attention:
        keys = tuple(n * config.head_size for n in shares(config.key_value_heads, size))
        queries = tuple(n * config.heads // config.key_value_heads for n in keys)
        columns, row = {"q_proj": queries, "k_proj": keys, "v_proj": keys}, ("o_proj", queries)
    else:
        lengths = shares(config.mlp_size, size)
        columns, row = {"gate_proj": lengths, "up_proj": lengths}, ("down_proj", lengths)
    found = {}
    for matrix, lengths in columns.items():
        found |= {f"{matrix}.weight": (0, lengths), f"{matrix}.bias": (0, lengths)}
    found |= {f"{row[0]}.weight": (1, row[1]), f"{row[0]}.bias": None}
    return found | ({"norm.weight": None} if layer is NormedMLP else {})


def part_of(tensor: torch.Tensor, cut: tuple | None, rank: int) -> torch.Tensor:
    """A rank's part of a whole parameter or of its gradient."""
    return tensor if cut is None else tensor.split(list(cut[1]), dim=cut[0])[rank]


def built(answer, case: dict, whole: nn.Module) -> nn.Module:
    """The answer's layer."""
    given = (whole.norm, whole) if case["layer"] == "SequenceMLP" else (whole,)
    return getattr(answer, case["layer"])(*given)


def parameters_of(layer: nn.Module, case: dict) -> dict[str, nn.Parameter]:
    """The parameters of the answer's layer that the contract names."""
    return {name: layer.get_parameter(name) for name in cuts(case, 1)}


def parts(answer, cases: list[dict]) -> list[dict]:
    """On a rank: its parts of each layer, and what else is still in memory."""
    found = []
    for case in cases:
        whole = whole_layer(case)
        before = {name: p.detach().clone() for name, p in whole.named_parameters()}
        storages = [weakref.ref(p.untyped_storage()) for p in whole.parameters()]
        with Look() as look:
            layer = built(answer, case, whole)
        mine = parameters_of(layer, case)
        changed = [n for n, p in whole.named_parameters() if not torch.equal(p, before[n])]
        ours = {id(p.untyped_storage()) for p in mine.values()}
        del whole
        gc.collect()
        alive = [storage() for storage in storages]
        held = sum(s.nbytes() for s in alive if s is not None and id(s) not in ours)
        del alive
        found.append({
            "parts": {name: p.detach().clone() for name, p in mine.items()},
            "stored": {name: p.untyped_storage().nbytes() for name, p in mine.items()},
            "changed": changed, "beside": held + look.kept(list(mine.values())),
        })
    return found


def steps(answer, cases: list[dict]) -> list[list[dict]]:
    """On a rank: some passes of each layer, and some steps of its optimizer."""
    return [_steps(answer, case) for case in cases]


def _steps(answer, case: dict) -> list[dict]:
    layer = built(answer, case, whole_layer(case))
    mine, found = parameters_of(layer, case), []
    sequence = case["layer"] == "SequenceMLP"
    with Look() as always:
        for step in case["steps"]:
            x, dy, more = _inputs(case, step)
            if sequence:
                lengths, rank = shares(x.shape[1], dist.get_world_size()), dist.get_rank()
                x, dy = (t.split(list(lengths), dim=1)[rank].contiguous() for t in (x, dy))
                more = (step["shape"][1],)
            x.requires_grad_()
            with Look(x=x, tables=more, **mine) as forward:
                y = layer(x, *more)
            allowed = allowed_bytes(case, step["shape"], dist.get_rank(), dist.get_world_size())
            saved = forward.kept(y, allowed=allowed) if sequence else 0
            with Look(x=x, dy=dy, **mine) as backward:
                y.backward(dy)
            with Look(x=x, tables=more, **mine) as asking, torch.no_grad():
                again = layer(x.detach(), *more)
            gradients = [parameter.grad for parameter in mine.values()]
            one = {"y": y.detach().clone(), "again": again, "dx": x.grad, "saved": saved,
                   "spare": forward.spare(y) + backward.spare(x.grad, gradients)}
            with Look() as after:
                if sequence and step["last"]:
                    answer.sum_partial_gradients(layer)
            found.append(one | {
                "gradients": {n: None if p.grad is None else p.grad.clone()
                              for n, p in mine.items()},
                "forward": seen(forward), "backward": seen(backward), "after": seen(after),
                "asking": seen(asking),
            })
            del x, dy, y, again, more, one, forward, backward, after, asking, gradients
            if step["last"]:
                _update(layer.parameters())
    kept = always.kept(found, list(mine.values()))
    return [{**one, "kept": kept} for one in found]


def allowed_bytes(case: dict, shape: tuple[int, int], rank: int, size: int) -> int:
    """Kept for the backward pass by SequenceMLP: all positions once, four times its own columns,
    and up to three times its own positions (a norm may be written in several ways), of bf16 in
    fp32."""
    (b, t), config = shape, case["config"]
    own, columns = shares(t, size)[rank], shares(config.mlp_size, size)[rank]
    numbers, value = t * config.hidden_size + 4 * t * columns, case["dtype"].itemsize
    return b * (numbers * value + own * (3 * config.hidden_size + 2) * max(4, value))


def _inputs(case: dict, step: dict) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """x and dy of the whole layer, (B, T, C), and what it is called with besides."""
    (b, t), c, dtype = step["shape"], case["config"].hidden_size, case["dtype"]
    x = fractions(step["seed"], b, t, c, dtype=dtype)
    dy = fractions(step["seed"] + 1, t, b, c, dtype=dtype).transpose(0, 1)  # not contiguous
    dy = dy if step["transposed"] else dy.contiguous()
    if case["layer"] != "ParallelAttention":
        return x, dy, ()
    positions = torch.arange(step["start"], step["start"] + t)
    cos, sin = rotary_tables(case["config"], positions, dtype)
    return x, dy, (cos[:, None], sin[:, None])


@torch.no_grad()
def _update(parameters: Iterator[nn.Parameter]) -> None:
    """A step of SGD."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter -= 0.02 * parameter.grad
            parameter.grad = None


def right_steps(case: dict) -> list[dict]:
    """The same steps of the whole layer in float64."""
    layer, found = whole_layer(case).double(), []
    for step in case["steps"]:
        x, dy, more = _inputs(case, step)
        x = x.double().requires_grad_()
        y = layer(x, *(t.double() for t in more))
        y.backward(dy.double())
        gradients = {n: p.grad.clone() for n, p in layer.named_parameters()}
        sizes = [t.detach().abs().max().item() for t in (y, x.grad, *gradients.values())]
        found.append({
            "y": y.detach(), "dx": x.grad, "gradients": gradients, "largest": max(sizes),
            "biases": {n: p.detach().clone() for n, p in layer.named_parameters() if "bias" in n},
        })
        if step["last"]:
            _update(layer.parameters())
    return found


# ---- b and c: what the layers are made with


def cut_linears(answer, cases: list[dict]) -> list[dict]:
    """On a rank: its parts of single linear layers; lengths are as they come."""
    found = []
    for case in cases:
        linear = linear_of(case)
        before = linear.weight.detach().clone(), linear.bias.detach().clone()
        layer = getattr(answer, case["function"])(linear, tuple(case["lengths"]))
        same = torch.equal(linear.weight, before[0]) and torch.equal(linear.bias, before[1])
        found.append({
            "weight": layer.weight.detach().clone(), "bias": layer.bias.detach().clone(),
            "stored": layer.weight.untyped_storage().nbytes(), "changed": not same,
        })
    return found


def linear_of(case: dict) -> nn.Linear:
    """The whole linear layer of such a case."""
    linear = nn.Linear(*case["shape"], dtype=case["dtype"])
    linear.weight.data = fractions(case["seed"], *linear.weight.shape, dtype=case["dtype"])
    linear.bias.data = fractions(case["seed"] + 1, *linear.bias.shape, dtype=case["dtype"])
    return linear


def head_sizes(answer, cases: list[tuple[int, int, int]]) -> list:
    """On a rank: what head_sizes says, whatever numbers and lists it is made of."""
    return [tuple(tuple(int(n) for n in one) for one in answer.head_sizes(*case)) for case in cases]
