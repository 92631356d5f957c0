"""Given: a small GPT trained by your classes; bytes per parameter that a rank keeps and sends."""

import torch
import torch.distributed as dist

from utils.course.runner import attempted
from utils.data import corpus
from utils.measure.traffic import Traffic
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.planner.memory import bytes_per_rank

CONFIG = GPTConfig(hidden_size=64, layers=2, heads=4)
STAGES = ("Zero1", "Zero2", "Zero3")
KINDS = ("parameters", "gradients", "optimizer")
BATCH, SEQ, STEPS = 8, 32, 6


def measured(size: int, file: str) -> dict[str, dict] | None:
    """{stage: {kind: bytes per parameter}} on rank 0 of `size`; None if a class is missing."""
    ranks = attempted(file, size, _stages)
    return ranks and ranks[0]


def formula(size: int) -> dict[str, dict[str, float]]:
    """As `measured`, but from the paper's formulas, in fp32 with AdamW."""
    count = CONFIG.parameter_count()
    held = [bytes_per_rank(count, size, stage=stage, precision="fp32") for stage in (1, 2, 3)]
    return {name: {kind: h[kind] / count for kind in KINDS} for name, h in zip(STAGES, held)}


def _stages(answer) -> dict[str, dict]:
    return {stage: _run(getattr(answer, stage)) for stage in STAGES}


def _run(stage: type) -> dict:
    """On a rank: take some steps; measure the memory after the last backward pass."""
    rank, size = dist.get_rank(), dist.get_world_size()
    text = corpus.split(corpus.load())[0]
    torch.manual_seed(0)
    model = GPT(CONFIG)
    decoder = model.model
    units = [decoder.embed_tokens, *decoder.layers, decoder.norm, model.lm_head]
    zero = stage(units, lambda shards: torch.optim.AdamW(shards, lr=3e-3))
    losses, traffic = [], Traffic()
    for step in range(STEPS):
        x, y = corpus.batch(text, step, BATCH, SEQ, rank=rank, world_size=size)
        with traffic:
            loss = cross_entropy(model(x), y)
            loss.backward()
        total = loss.detach() / size
        dist.all_reduce(total)
        losses.append(total.item())
        held = _held(model, zero)
        with traffic:
            zero.step()
    count = CONFIG.parameter_count()
    result = {kind: size_in_bytes / count for kind, size_in_bytes in held.items()}
    return result | {"sent": traffic.sent() / STEPS / count, "losses": losses}


def _held(model: torch.nn.Module, zero) -> dict[str, int]:
    """Bytes by kind; each storage counts once."""
    shards = [unit.shard for unit in zero.units]
    kinds = {
        "parameters": [*model.parameters(), *shards],
        "gradients": [p.grad for p in [*model.parameters(), *shards] if p.grad is not None],
        "optimizer": [
            value
            for state in zero.optimizer.state.values()
            for value in state.values()
            if value.numel() > 1
        ],
    }
    held = {}
    for kind, tensors in kinds.items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        held[kind] = sum(storages.values())
    return held
