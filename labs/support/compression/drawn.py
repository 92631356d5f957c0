"""Given: models and text that a check draws from a seed.

No answer can know in advance which heads and channels matter: that depends on the seed. The text
comes from modules on which the shipped models were not trained (utils/data/library.py).
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Sized
from dataclasses import replace
from pathlib import Path

import torch

from utils.models import shipped
from utils.models.config import GPTConfig
from utils.models.gpt import GPT, cross_entropy

torch.set_num_threads(1)  # the tensors are too small for a second thread to help

MODULES = ("typing", "subprocess", "xml.dom.minidom")  # held out from training
SIZES = {  # heads kept -> how four heads divide the 64 dimensions of tiny's only head
    1: (44, 10, 6, 4),
    2: (30, 25, 6, 3),
}
ROWS, T = 4, 64


@functools.cache
def tokens() -> torch.Tensor:
    """The modules' text as tokens."""
    files = [importlib.util.find_spec(name).origin for name in MODULES]
    text = "\n".join(Path(file).read_text(encoding="utf-8") for file in files)
    return torch.tensor(tiny()[1].encode(text))


@functools.cache
def tiny():
    return shipped.load("tiny")


def batches(seed: int, calibration: int, held_out: int) -> tuple:
    """(calibration, held out): lists of batches (tokens, targets), each (ROWS, T)."""
    whole, count = tokens(), (calibration + held_out) * ROWS
    starts = torch.arange(0, len(whole) - T - 1, T)
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed))
    rows = whole[starts[order[:count], None] + torch.arange(T + 1)].split(ROWS)
    pairs = [(some[:, :-1].contiguous(), some[:, 1:].contiguous()) for some in rows]
    return pairs[:calibration], pairs[calibration:]


@torch.no_grad()
def loss(model: GPT, some: list) -> float:
    """The mean loss, in nats per token."""
    return sum(cross_entropy(model(x), y).item() for x, y in some) / len(some)


# ---- heads


@torch.no_grad()
def many_heads(generator: torch.Generator, sizes: tuple[int, ...]) -> tuple[GPT, list[list[int]]]:
    """tiny with its head split among several, each of which gets some dimensions of its values.
    Also returns, for each layer, the index in `sizes` of each head.

    The rest of a head has no effect (values that meet zeros in o_proj, columns that meet zeros in
    v_proj, a channel that the norm zeroes): the weights alone do not tell which head does the work.
    """
    model = tiny()[0]
    config, D, H = model.config, model.config.head_size, len(sizes)
    model, state = GPT(replace(config, heads=H, kv_heads=H, head_dim=D)), model.state_dict()

    drawn, orders = functools.partial(torch.randn, generator=generator), []
    for index in range(config.layers):
        name = f"model.layers.{index}."
        q, k, v, o = (state[f"{name}self_attn.{part}_proj.weight"] for part in "qkvo")
        norm = state[f"{name}input_layernorm.weight"].clone()
        dead = int(torch.randint(len(norm), (), generator=generator))
        norm[dead] = 0.0
        turned = torch.linalg.qr(drawn(D, D)).Q
        v, o = turned @ v, o @ turned.T
        places = torch.randperm(D, generator=generator).split(sizes)
        parts = {part: [] for part in "qkvo"}
        orders.append(torch.randperm(H, generator=generator).tolist())
        for head in orders[-1]:
            own, f = places[head], float(drawn(1).exp())
            rest = torch.cat([*places[:head], *places[head + 1 :]])
            rest = rest[torch.randperm(len(rest), generator=generator)]
            v_head, o_head = torch.zeros_like(v), torch.zeros_like(o)
            v_head[own], o_head[:, own] = v[own] * f, o[:, own] / f
            some, others = rest.chunk(2)
            much = 3 * (max(sizes) / len(own)) ** 0.5  # heads that do less look larger
            v_head[some] = drawn(len(some), v.shape[1]) * v.std() * f * much
            o_head[:, others] = drawn(len(o), len(others)) * o.std() / f * much
            v_head[:, dead] = drawn(D) * 10 * v.std() * f * much
            for part, made in zip("qkvo", (q, k, v_head, o_head)):
                parts[part].append(made)
        state[f"{name}input_layernorm.weight"] = norm
        for part in "qkvo":
            whole = torch.cat(parts[part], dim=int(part == "o"))
            state[f"{name}self_attn.{part}_proj.weight"] = whole
    model.load_state_dict(state)
    return model.eval(), orders


# ---- a teacher with its own language

LANGUAGE = GPTConfig(
    vocab_size=64, hidden_size=32, layers=2, heads=4, intermediate_size=128, max_positions=32,
    tie_embeddings=False,
)


@torch.no_grad()
def speaker(generator: torch.Generator) -> GPT:
    """A model with random weights, large enough for its output to depend on the context."""
    model = GPT(LANGUAGE)
    gains = {"embed": 32**0.5, "lm_head": 2.0, "mlp.gate": 1.0, "mlp.up": 1.0, "v_proj": 1.0}
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            gain = next((gain for part, gain in gains.items() if part in name), 1.5)
            size = gain / math.sqrt(parameter.shape[1])
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def trained(student: GPT, batches: Sized, lr: float, loss: Callable) -> GPT:
    """Train the student, one AdamW step per batch: loss(student, tokens, targets)."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0)
    for step, (tokens, targets) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / len(batches))
        optimizer.zero_grad()
        loss(student, tokens, targets).backward()
        optimizer.step()
    return student
