"""Lab 10: the answers that its checks must accept and reject, and its support code."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from labs.support.five_dimensions import limit
from labs.support.five_dimensions.cases import UNSEEN, best, outcomes
from labs.support.five_dimensions.contracts import SEARCHED, submitted
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.choices import RECOMPUTE
from utils.planner import Strategy
from utils.planner.plan import evaluate
from utils.planner.search import candidates
from utils.planner.strategy import Columns
from utils.ranks import Ranks

SUBMITTED = ("one_node", "cluster", "frontier")
LAB = Lab(
    "10_five_dimensions",
    {
        "by_hand": ("contracts", "by_hand", "by_hand.py"),
        **{name: ("contracts", name, "submissions.py") for name in SUBMITTED},
        "search": ("contracts", "search", "find_best.py"),
        "ladder": ("contracts", "ladder", "ladder.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


# ── support code ──────────────────────────────────────────────────────────────────────────────


def power(number: np.ndarray) -> np.ndarray:
    return number & (number - 1) == 0


# Incomplete searches: the strategies that each would still find.
HABITS: dict[str, Callable[[Columns], np.ndarray]] = {
    "powers of two": lambda c: power(c.tp) & power(c.pp),
    "tp 1": lambda c: c.tp == 1,
    "tp up to 4": lambda c: c.tp <= 4,
    "tp from 2": lambda c: c.tp > 1,
    "pp up to 4": lambda c: c.pp <= 4,
    "pp from 2": lambda c: c.pp > 1,
    "dp from 2": lambda c: c.dp > 1,
    "micro-batches from 2": lambda c: c.micro_batch > 1,
    "micro-batches up to 4": lambda c: c.micro_batch <= 4,
    **{f"no micro-batches of {b}": lambda c, b=b: c.micro_batch != b for b in (2, 4, 8)},
    "no chunks": lambda c: c.interleave == 1,
    "chunks up to 4": lambda c: c.interleave <= 4,
    "chunks by powers of two": lambda c: power(c.interleave),
    **{f"not {mode}": lambda c, mode=mode: c.recompute != mode for mode in RECOMPUTE},
    **{f"no zero {stage}": lambda c, stage=stage: c.zero != stage for stage in (0, 1, 3)},
    "whole sequences": lambda c: ~c.sequence_parallel,
    "split sequences": lambda c: c.sequence_parallel | (c.pp * c.tp * c.dp == 1),
}


def test_a_search_that_tries_less_is_too_slow_for_one_of_the_machines():
    met = set()
    for case in UNSEEN:
        c = candidates(*case, micro_batch=(1, 2, 4, 8, 16), cp=1)
        _, _, seconds, _, fits = evaluate(case.model, c, case.machine)
        least = seconds["total"][fits].min()
        for name, habit in HABITS.items():
            left = seconds["total"][fits & habit(c)]
            met |= {name} if not len(left) or left.min() * SEARCHED > least else set()
    assert met == set(HABITS)
    assert UNSEEN[0].gpus == 1 and max(case.gpus for case in UNSEEN) > 500


def test_the_fastest_is_the_fastest_of_all():
    case = UNSEEN[1]
    tried = [
        Strategy(dp, pp, tp, 1, v, b, case.global_batch, again, zero, split)
        for dp, pp, tp in itertools.product(range(1, case.gpus + 1), repeat=3)
        if dp * pp * tp == case.gpus
        for v, b in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4, 8, 16))
        for again in ("none", "selective", "full")
        for zero in (0, 1, 3)
        for split in (False, True)
    ]
    found = outcomes(case.model, case.machine, tried)
    least = min(one.seconds for one in found if one is not None and one.fits)
    assert best(case).seconds["total"] == pytest.approx(least)


def test_what_is_not_written_is_no_strategy(tmp_path):
    assert submitted(LAB.solution / "submissions.py", "one_node").tp == 2
    path = tmp_path / "submissions.py"
    path.write_text("def one_node():\n    raise NotImplementedError('yours')\n")
    assert submitted(path, "one_node") is None


def test_the_table_says_where_a_step_of_each_rung_goes(capsys):
    with Ranks(1, device="cpu") as ranks:
        (found,) = ranks.run(limit.train, None, replace(limit.RUN, layers=1, batch=2))
    limit.rows[:] = [limit.Rung({}, 1.0, found)]
    limit.table()
    header, row = capsys.readouterr().out.splitlines()[-2:]
    assert header.split() == ["ms", "per", "step:", "compute", "communication", "bubble", "host"]
    *ms, words = row.split()
    assert words == "plain" and abs(sum(map(float, ms)) - found.split.total) <= 2
    assert found.split.compute > 0
