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


class TestLab(LabTests):
    lab = LAB


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
