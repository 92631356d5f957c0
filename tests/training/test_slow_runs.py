"""The slow runs of lesson 11, whose notebook shows that each cause is found."""

import pytest
import torch
import torch.distributed as dist

from tests.patience import patience
from utils.measure.findings import report
from utils.ranks import Ranks
from utils.training import slow_runs


def threads_afterwards(folder):
    slow_runs.train(folder, "C", steps=1)
    return torch.get_num_threads()


def test_a_run_leaves_a_rank_as_it_was(tmp_path):
    with Ranks(2, device="cpu", timeout=patience(60)) as ranks:
        assert ranks.run(threads_afterwards, tmp_path) == [1, 1]
        assert ranks.run(dist.is_initialized) == [True, True]
    assert all(trace.facts["threads"] > 1 for trace in report(tmp_path).traces)


def test_an_unknown_run_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"run 'G' is not one of sound, A, B, C, D, E, F"):
        slow_runs.train(tmp_path, "G")
    assert not list(tmp_path.iterdir())
