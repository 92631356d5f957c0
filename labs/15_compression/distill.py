"""Exercise 15d, open: win the bits back that pruning has cost, in a fixed budget.

    student = distill(teacher, student, batches)

The teacher knows more about a place than the one token that stands there: how likely all others
would have been. The student learns from both (Hinton et al., arXiv:1503.02531).
"""

import torch
from torch.nn import functional as F

from utils.models.gpt import cross_entropy


def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
    """share · τ² · KL(teacher ‖ student) + (1 − share) · cross entropy, each the mean over tokens.

    logits (B, T, V), targets int64 (B, T), τ the temperature: both distributions in KL are
    softmax(logits / τ), and the teacher's says how much each token weighs. τ² keeps the gradient's
    size where τ grows. The cross entropy is of the student's logits as they are.
    A tensor of one number, in fp32 where logits are bf16, else in their type; no gradient goes to
    the teacher's logits, and logits may be large (±10,000).
    """
    raise NotImplementedError("KL of the softened distributions, mixed with the cross entropy")


def distill(teacher, student, batches, lr=1e-2):
    """Trains the student in place, and returns it.

    batches   (tokens, targets), int64 (B, T) each; they have a length, and can be gone through
              once. That is the budget: the student computes each token of theirs once at most, the
              teacher too, and no others. The rest is yours: loss, optimizer, schedule
    lr        the size of the steps; the default is yours, too. The check leaves it out
    The teacher stays as it is, gets no gradient, and its pass makes no graph. Nothing but the
    student remains.
    """
    raise NotImplementedError("a step for each batch, with what the teacher says of it")
