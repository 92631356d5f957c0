"""Lab 10: the answers that its checks must accept and reject, and its pieces."""

import itertools
import random

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.planner import Strategy

SUBMITTED = ("one_node", "cluster", "frontier")
LAB = Lab(
    "10_five_dimensions",
    {
        "by_hand": ("check_strategies", "by_hand", "by_hand.py"),
        **{name: ("check_strategies", name, "submissions.py") for name in SUBMITTED},
        "search": ("check_strategies", "search", "find_best.py"),
    },
)

OTHERS = {
    "by_hand: whole bytes": """
def state_bytes(parameters, tp, pp, dp, zero):
    split = [12, 2, 2][:zero]
    kept = [12, 2, 2][zero:]
    return round((sum(kept) + sum(split) / dp) * parameters / tp / pp)


def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
    here = (layers + pp - 1) // pp
    return hidden * seq * here * micro_batch * sorted((pp, micro_batches))[0] << 1
""",
    "by_hand: fractions": """
from fractions import Fraction


def state_bytes(parameters, tp, pp, dp, zero):
    shares = [Fraction(12, dp if zero else 1), Fraction(2, dp if zero > 1 else 1)]
    shares.append(Fraction(2, dp if zero > 2 else 1))
    return sum(share * Fraction(parameters) / (tp * pp) for share in shares)
""",
    "by_hand: arrays of NumPy": """
import numpy as np


def state_bytes(parameters, tp, pp, dp, zero):
    kinds = np.array([12.0, 2.0, 2.0])
    kinds[: min(zero, 3)] /= dp
    return kinds.sum() * (np.float64(parameters) / (tp * pp))


def activation_bytes(**sizes):
    named = ("layers", "hidden", "seq", "pp", "micro_batch", "micro_batches")
    layers, hidden, seq, pp, b, m = np.array([sizes[name] for name in named], dtype=np.int64)
    return 2 * b * seq * hidden * np.ceil(layers / pp).astype(np.int64) * np.minimum(pp, m)


_by_name = activation_bytes


def activation_bytes(*sizes, **named):
    words = ("layers", "hidden", "seq", "pp", "micro_batch", "micro_batches")
    return _by_name(**dict(zip(words, sizes)), **named)
""",
    "by_hand: counted, micro-batch by micro-batch": """
import torch


def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
    here = len(range(0, layers, pp))
    under_way = most = 0
    for clock in range(2 * pp + micro_batches):
        under_way += clock < micro_batches
        under_way -= clock >= pp
        most = max(most, min(under_way, micro_batches))
        if clock >= micro_batches:
            break
    return torch.tensor(2.0 * micro_batch * seq * hidden * here, dtype=torch.float64) * most
""",
    "one_node: fewer stages, more pieces": """
def one_node():
    return Strategy(dp=4, pp=2, interleave=4, recompute="selective", zero=1)
""",
    "one_node: nothing recomputed": """
def one_node():
    return Strategy(dp=2, pp=2, tp=2, interleave=4, micro_batch=2, zero=1, sequence_parallel=True)
""",
    "one_node: what the machine decides, said aloud": """
_one_node = one_node


def one_node():
    open_to = {"attention": "fused", "precision": "bf16", "overlap_tp": False, "global_batch": 256}
    return Strategy(**{**vars(_one_node()), **open_to})
""",
    "one_node: no zero at all": """
from dataclasses import replace


def one_node():
    four = Strategy(pp=4, tp=2, micro_batch=2, sequence_parallel=True)
    return replace(four, interleave=2)
""",
    "cluster: by position": """
def cluster():
    return Strategy(16, 8, 8, 1, 6, 2, recompute="selective", zero=1, sequence_parallel=True)
""",
    "cluster: the fastest": """
def cluster():
    return Strategy(dp=32, pp=8, tp=4, interleave=6, micro_batch=2, global_batch=1536,
                    recompute="selective", zero=1, sequence_parallel=True)
""",
    "cluster: four stages of many chunks": """
class Mine(Strategy):
    pass


def cluster():
    return Mine(64, 4, 4, interleave=8, recompute="selective", zero=1, sequence_parallel=True)
""",
    "cluster: its own search": """
import itertools

from labs.support.five_dimensions.cases import CASES, outcomes


def cluster():
    case = CASES["cluster"]
    tried = [Strategy(dp, 1024 // dp // tp, tp, 1, v, 1, case.global_batch, "selective", 1, True)
             for dp, tp, v in itertools.product((16, 32, 64), (4, 8), (1, 2, 4, 6))]
    found = outcomes(case.model, case.machine, tried)
    good = [i for i, one in enumerate(found) if one and one.fits]
    return tried[min(good, key=lambda i: found[i].seconds)]
""",
    "frontier: all by position": """
def frontier():
    return Strategy(12, 16, 16, 1, 8, 2, None, "selective", 1, True)
""",
    "frontier: eight stages": """
def frontier():
    return Strategy(dp=24, pp=8, tp=16, interleave=4, recompute="selective", zero=1,
                    sequence_parallel=True)
""",
    "frontier: looked at with the planner": """
from labs.support.five_dimensions.cases import CASES
from utils.planner import plan


def frontier():
    model, machine, _, batch = CASES["frontier"]
    some = [Strategy(3072 // tp // pp, pp, tp, 1, v, 1, batch, "selective", 1, True)
            for tp, pp, v in ((8, 16, 4), (16, 16, 8), (8, 32, 4))]
    return min((one for one in some if plan(model, one, machine).fits),
               key=lambda one: plan(model, one, machine).seconds["total"])
""",
    "frontier: few ranks of dp": """
def frontier():
    return Strategy(dp=6, pp=32, tp=16, interleave=4, micro_batch=2, recompute="selective", zero=1,
                    sequence_parallel=True)
""",
    "search: one after the other": """
def best_strategy(model, machine, gpus, global_batch):
    best, least = None, float("inf")
    for tp in range(1, min(gpus, model.heads) + 1):
        for pp in range(1, min(gpus, model.layers) + 1):
            if gpus % (tp * pp) or model.heads % tp:
                continue
            tried = [
                Strategy(gpus // (tp * pp), pp, tp, 1, v, b, None, again, zero, split)
                for v in ((1, 2, 3, 4, 6, 8) if pp > 1 else (1,))
                for b in (16, 8, 4, 2, 1)
                if global_batch * tp * pp % (gpus * b) == 0
                for again in ("full", "selective", "none")
                for zero in ((3, 1, 0) if pp == 1 else (1, 0))
                for split in ((True, False) if tp > 1 else (False,))
            ]
            same = [Strategy(**{**vars(one), "global_batch": global_batch}) for one in tried]
            for one, outcome in zip(tried, outcomes(model, machine, same)):
                if outcome and outcome.fits and outcome.seconds < least:
                    best, least = one, outcome.seconds
    return best
""",
    "search: sorted, the last of equals, zero 2 too": """
def best_strategy(model, machine, gpus, global_batch):
    tried = []
    for tp, pp in itertools.product(range(1, gpus + 1), repeat=2):
        if gpus % (tp * pp) == 0:
            dp = gpus // tp // pp
            sizes = itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4, 8, 16, 32))
            for v, b in sizes:
                if global_batch % (dp * b) == 0 and (v == 1 or pp > 1):
                    tried += [
                        Strategy(dp, pp, tp, 1, v, b, global_batch, again, zero, split)
                        for again in ("none", "selective", "full")
                        for zero in (0, 1, 2, 3)
                        if zero < 2 or pp == 1
                        for split in {False, tp > 1}
                    ]
    found = zip(outcomes(model, machine, tried), range(len(tried)))
    good = sorted((one.seconds, -i) for one, i in found if one is not None and one.fits)
    return tried[-good[0][1]]
""",
    "search: the planner's columns": """
import numpy as np

from utils.planner.plan import evaluate
from utils.planner.strategy import Columns, valid


def best_strategy(model, machine, gpus, global_batch):
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    tried = [
        Strategy(gpus // (tp * pp), pp, tp, 1, v, b, global_batch, again, zero, split)
        for tp in sizes
        for pp in sizes
        if gpus % (tp * pp) == 0
        for v in ((1, 2, 3, 4, 6, 8) if pp > 1 else (1,))
        for b in (1, 2, 4, 8, 16)
        if global_batch % (gpus // (tp * pp) * b) == 0
        for again in ("none", "selective", "full")
        for zero in ((0, 1, 3) if pp == 1 else (0, 1))
        for split in ((False, True) if tp > 1 else (False,))
    ]
    columns = Columns.of(tried, model, machine)
    columns = columns.take(valid(columns, model, machine))
    _, _, seconds, _, fits = evaluate(model, columns, machine)
    return columns.take(np.where(fits, seconds["total"], np.inf).argmin()[None]).strategies()[0]
""",
    "search: remembers what it was asked": """
import functools

best_strategy = functools.cache(best_strategy)
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 70, (12, 6, 4)

    def task(self, exercise, tasks):
        return tasks[SUBMITTED.index(exercise) if exercise in SUBMITTED else 0]


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_drawn_cases_meet_every_habit():
    """Whoever tries only a part is too slow, or finds nothing, in one of them."""
    from labs.support.five_dimensions.check_strategies import HABITS, OWN, _costs, unseen
    from utils.planner.plan import USABLE

    for seed in range(5):
        cases, met = unseen(random.Random(seed)), set()
        for case in cases:
            columns, seconds, held, least = _costs(case)
            fits = held <= USABLE * case.machine.memory
            for name, habit in HABITS.items():
                left = seconds[fits & habit(columns)]
                met |= {name} if not len(left) or left.min() * OWN > least else set()
        assert met == set(HABITS), seed
        one, machine, less = cases[:3]
        assert one.gpus == 1 and max(case.gpus for case in cases) >= 360
        assert machine.model == less.model and machine.machine.name == less.machine.name
        assert machine.machine.memory > less.machine.memory


def test_the_fastest_is_the_fastest_of_all():
    """What a search is compared with, against every strategy, one by one."""
    from labs.support.five_dimensions.cases import outcomes
    from labs.support.five_dimensions.check_strategies import _costs, unseen

    for case in unseen(random.Random(3))[:3]:
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
        assert _costs(case)[3] == pytest.approx(least)


def test_what_is_submitted_is_read_in_a_process_of_its_own(tmp_path):
    from labs.support.five_dimensions.check_strategies import submitted

    file = LAB.solution / "submissions.py"
    assert submitted(file, "one_node") == Strategy(
        dp=4, tp=2, micro_batch=2, recompute="selective", zero=1, sequence_parallel=True
    )
    path = tmp_path / "submissions.py"
    path.write_text("def one_node():\n    raise NotImplementedError('yours')\n")
    assert submitted(path, "one_node") is None
