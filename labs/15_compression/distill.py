"""Exercise 15d, open: recover the quality that pruning has cost, within a fixed budget.

    student = distill(teacher, student, batches)

The teacher knows more about a position than the one token that is there: how likely all others
would have been. The student learns from both (Hinton et al., arXiv:1503.02531).
"""

import torch
from torch.nn import functional as F

from utils.models.gpt import cross_entropy


def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
    """share · τ² · KL(teacher ‖ student) + (1 − share) · cross entropy, each the mean over tokens.

    logits (B, T, V), targets int64 (B, T), τ the temperature: both distributions in KL are
    softmax(logits / τ), and the teacher's gives the weight of each token. τ² keeps the gradient's
    size as τ grows. The cross entropy uses the student's logits as they are.
    Returns a scalar tensor, in fp32 if logits are bf16, otherwise in their type; no gradient goes
    to the teacher's logits, and logits may be large (±10,000).
    """
    raise NotImplementedError("KL of the softened distributions, mixed with the cross entropy")


def distill(teacher, student, batches, lr=1e-2):
    """Train the student in place, and return it.

    batches   (tokens, targets), int64 (B, T) each; they have a length, and can be iterated over
              once. That is the budget: student and teacher each compute every token at most once,
              and no others. The rest is your choice: loss, optimizer, schedule
    lr        the size of the steps; the default is your choice too. The check does not pass it
    The teacher is not changed, gets no gradient, and its pass builds no graph. Only the student is
    kept.
    """
    raise NotImplementedError("a step for each batch, with the teacher's predictions")
