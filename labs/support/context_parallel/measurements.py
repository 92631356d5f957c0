"""Given: your functions on one sequence: the bytes that all ranks send and each rank's work."""

import os
import random
from collections import namedtuple
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from labs.support.context_parallel.contracts import AttentionLook, Case
from utils.course import ledger
from utils.course.checks import SEED
from utils.course.messages import noted
from utils.course.runner import attempted

LENGTH, WIDTH = 96, 16  # positions in the sequence, elements per head
WAYS = ("ring_attention", "thrifty_ring_attention", "zigzag_attention", "ulysses_attention")
MODELS = ((8, 2), (16, 2), (32, 2), (4, 4), (8, 4), (16, 4), (32, 4), (8, 8), (16, 8), (32, 8))
Heads = namedtuple("Heads", ("query", "key_value"))  # how many of each a model has


def drawn_heads(seed: int | None = None) -> Heads:
    """Draw a model's heads. seed None: that of the checks if it is set, otherwise one per learner,
    whose stored prediction must stay valid."""
    seed = seed if seed is not None else os.environ.get(SEED)
    return Heads(*random.Random(str(ledger.home()) if seed is None else int(seed)).choice(MODELS))


def measured(size: int, file: str, heads: Heads) -> dict | None:
    """{function: {"sent": bytes that all ranks send, "work": each rank's fraction of the products,
    "right": whether the results match one rank's}} for the functions of WAYS that are written;
    None if one of them does not run."""
    case = Case(size, LENGTH, 1, heads.query, heads.key_value, WIDTH, torch.float32, seed=7)
    ranks, found = attempted(file, size, _all_ways, case), {}
    if ranks is None:
        return None
    for name in ranks[0]:
        sent, works, right = zip(*(rank[name] for rank in ranks))
        work = [round(work / sum(works), 2) for work in works]
        found[name] = {"sent": int(sum(sent)), "work": work, "right": all(right)}
    return found


def _all_ways(answer, case: Case) -> dict:
    rank, found = dist.get_rank(), {}
    for name in filter(partial(hasattr, answer), WAYS):
        part = replace(case, zigzag=name == "zigzag_attention").part(rank)
        with noted() as notes, AttentionLook(notes) as look, suppress(NotImplementedError):
            result = getattr(answer, name)(*(part[x] for x in "qkv"), LENGTH)
            out = result if isinstance(result, torch.Tensor) else result[0]
            right = torch.allclose(out.double(), part["out"], atol=1e-5)
            found[name] = sum(event.sent for event in look.events), look.multiplications, right
    return found
