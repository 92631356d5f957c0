"""Lab 05: the answers that its checks must accept and reject, and its support code."""

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "05_sharded_data_parallel",
    {name: ("contracts", name, "zero.py") for name in ("zero1", "zero2", "zero3")},
)


class TestLab(LabTests):
    lab = LAB


def test_the_formula_is_what_is_measured():
    from labs.support.sharded_data_parallel.measurements import KINDS, formula, measured

    kept, expected = measured(2, LAB.solution / "zero.py"), formula(2)
    for stage, by_kind in expected.items():
        for kind in KINDS:
            assert kept[stage][kind] == pytest.approx(by_kind[kind], rel=0.01), (stage, kind)
    assert [round(kept[stage]["sent"] / 4 / 0.5, 2) for stage in expected] == [2, 2, 3]
