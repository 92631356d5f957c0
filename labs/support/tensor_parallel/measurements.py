"""Given: your layers in the lesson's GPT, and the activations that they keep and send."""

import torch
import torch.distributed as dist

from utils.course.observe import Look
from utils.course.runner import attempted
from utils.data import corpus
from utils.measure.traffic import Traffic
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.shares import shares

CONFIG = GPTConfig(hidden_size=48, layers=2, heads=6, kv_heads=3, intermediate_size=132)
BATCH, SEQ, STEPS = 4, 32, 6


def measured(size: int, file: str) -> dict | None:
    """Losses, parameters in the blocks' matrices and collectives per step on one of `size` ranks;
    None if the answer is not ready."""
    ranks = attempted(file, size, _train)
    return ranks and ranks[0]


def between(size: int, file: str) -> dict | None:
    """{class: {"kept": …, "sent": …}} on one of `size` ranks, per layer and in units of a (B, T, C)
    tensor: those kept for the backward pass in addition to its columns, and those sent per step.
    None if the answer is not ready."""
    ranks = attempted(file, size, _kept_and_sent)
    return ranks and ranks[0]


def _train(answer) -> dict:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for block in model.model.layers:
        block.self_attn = answer.ParallelAttention(_with_biases(block.self_attn))
        block.mlp = answer.ParallelMLP(_with_biases(block.mlp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    text, _ = corpus.split(corpus.load())
    losses = []
    for step in range(STEPS):
        x, y = corpus.batch(text, step, BATCH, SEQ)  # the same rows on every rank
        with Traffic() as traffic:
            loss = cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "losses": losses,
        "matrices": sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2),
        "calls": traffic.calls("all_reduce"),
        "payload": traffic.payload("all_reduce"),
        "others": traffic.calls() - traffic.calls("all_reduce"),
    }


def _with_biases(module):
    """Add the biases that the lab's layers need: zeros, which change nothing at first."""
    for linear in module.children():
        if linear.bias is None:
            linear.bias = torch.nn.Parameter(torch.zeros(linear.out_features))
    return module


def _kept_and_sent(answer) -> dict:
    names = filter(lambda name: hasattr(answer, name), ("ParallelMLP", "SequenceMLP", "ThriftyMLP"))
    return {name: _stack(getattr(answer, name), sequence=name != "ParallelMLP") for name in names}


def _stack(kind: type, sequence: bool) -> dict:
    """Run all MLPs of the model in sequence and measure what they keep and send."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    layers = []
    for block in GPT(CONFIG).model.layers:
        norm, mlp = block.post_attention_layernorm, _with_biases(block.mlp)
        layers.append([kind(norm, mlp)] if sequence else [norm, kind(mlp)])
    x = torch.randn(BATCH, SEQ, CONFIG.hidden_size)
    whole = x.numel() * x.element_size()
    if sequence:
        x = x.split(list(shares(SEQ, size)), dim=1)[rank]
    with Look(weights=[list(module.parameters()) for layer in layers for module in layer]) as look:
        y = x.clone().requires_grad_()
        for layer in layers:
            y = layer[0](y, SEQ) if sequence else y + layer[1](layer[0](y))
    columns = 4 * shares(CONFIG.mlp_size, size)[rank] / CONFIG.hidden_size
    kept = look.kept(y) / whole / CONFIG.layers - columns
    with Traffic() as backward:
        y.backward(torch.ones_like(y))
    sent = (sum(event.sent for event in look.events) + backward.sent()) / whole / CONFIG.layers
    return {"kept": kept, "sent": float(sent)}
