"""Lab 09: the answers that its checks must accept and reject, and its pieces."""

import itertools

import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.runner import Trial

LAB = Lab(
    "09_mixture_of_experts",
    {
        "all_to_all": ("contracts", "all_to_all", "dispatch.py"),
        "dispatch": ("contracts", "dispatching", "dispatch.py"),
        "combine": ("contracts", "combining", "dispatch.py"),
    },
    {"utils.course.runner.HANG": 6.0},
)


class TestLab(LabTests):
    lab = LAB


def test_cases_are_as_uneven_as_they_say():
    from labs.support.mixture_of_experts.contracts import EXAMPLE, layers

    for size, seed in itertools.product((1, 2, 3, 6), range(5)):
        for case in (*layers(Trial("dispatch.py", seed), size), EXAMPLE):
            assert case.size == 1 or 0 in case.tokens or min(case.tokens) > 255
            chosen = torch.cat([case.chosen_of(rank) for rank in range(case.size)])
            assert all(len(set(row)) == case.choices for row in chosen.tolist())
            assert case.wanted is None or set(chosen.flatten().tolist()) <= set(case.wanted)
