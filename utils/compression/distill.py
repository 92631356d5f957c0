"""Distillation: a small model learns a large one's predictions (Hinton et al., arXiv:1503.02531).

    student = distill(student, teacher, train, DistillConfig(steps=60))
    student = distill(student, None, train, DistillConfig(steps=60))    # without a teacher

A text gives only the token that came next. The teacher gives the probabilities of all tokens, so
there is more to learn from each position.
"""

import copy
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from utils.data import corpus
from utils.models.gpt import cross_entropy
from utils.training.optimizer import make_optimizer


@dataclass(frozen=True)
class DistillConfig:
    """Steps, rows per batch and tokens per row; temperature T of both distributions; the teacher's
    share of the loss, with the rest from the text; lr and optimizer as in training."""

    steps: int = 60
    batch: int = 8
    seq: int = 256
    temperature: float = 1.0
    share: float = 1.0
    lr: float = 5e-3
    optimizer: str = "muon"
    adamw_lr: float = 1e-3
    seed: int = 0


def distillation_loss(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """T² · KL(teacher ‖ student) of softmax(logits / T), averaged over tokens; both (B, T, V). T²
    makes the gradient's size roughly independent of T (Hinton et al., section 2)."""
    least = torch.promote_types(student.dtype, torch.float32)
    ours = F.log_softmax(student.to(least).flatten(0, 1) / temperature, dim=-1)
    theirs = F.log_softmax(teacher.to(least).flatten(0, 1) / temperature, dim=-1)
    return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def distill(
    student: torch.nn.Module,
    teacher: torch.nn.Module | None,
    tokens: torch.Tensor,
    config: DistillConfig,
) -> torch.nn.Module:
    """A trained copy of the student.

    teacher   None: train on the text alone, with the same batches
    tokens    1-D, to train on
    """
    student = copy.deepcopy(student).train()
    optimizer = make_optimizer(student, config.optimizer, config.lr, config.adamw_lr)
    for step in range(config.steps):
        optimizer.set_lr(1 - step / config.steps)
        x, y = corpus.batch(tokens, step, config.batch, config.seq, seed=config.seed)
        logits = student(x)
        loss = text = cross_entropy(logits, y)
        if teacher is not None:
            with torch.no_grad():
                theirs = teacher(x)
            kl = distillation_loss(logits, theirs, config.temperature)
            loss = config.share * kl + (1 - config.share) * text
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return student.eval()
