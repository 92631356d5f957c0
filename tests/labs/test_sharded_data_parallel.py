"""Lab 05: the answers that its checks must accept and reject, and its pieces."""

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "05_sharded_data_parallel",
    {name: ("check_zero", name, "zero.py") for name in ("zero1", "zero2", "zero3")},
    {"utils.course.checks.HANG": 10.0},  # two answers are judged at once
)

OTHERS = {
    "zero1: all-to-all and a sum": """
class Zero1(Zero1):
    def mean_gradient(self, unit):
        mine = unit.gradients()
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine) if self.size > 1 else theirs.copy_(mine)
        return theirs.view(self.size, -1).mean(dim=0)
""",
    "zero1: all units in one message": """
class Zero1(Zero1):
    def step(self):
        rows = torch.cat([u.gradients().view(self.size, -1) for u in self.units], dim=1)
        mine = torch.empty_like(rows[0])
        dist.reduce_scatter(mine, list(rows.contiguous()))
        pieces = (mine / self.size).split([unit.length for unit in self.units])
        for unit, piece in zip(self.units, pieces):
            unit.shard.grad = piece.clone()
            unit.forget_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units:
            self.gather(unit)
""",
    "zero2: adds in place": """
class Zero2(Zero2):
    def after_backward(self, unit):
        if unit.shard.grad is None:
            unit.shard.grad = torch.zeros_like(unit.shard)
        unit.shard.grad += self.mean_gradient(unit)
        for parameter in unit.parameters:
            parameter.grad = None
""",
    "zero3: does not gather what is there": """
class Zero3(Zero3):
    def before_forward(self, unit):
        if not unit.is_whole():
            unit.allocate()
            self.gather(unit)

    before_backward = before_forward
""",
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 25
    untouched = ("zero1",)


def test_the_formula_is_what_is_measured():
    from labs.support.sharded_data_parallel.measurements import KINDS, formula, measured

    kept, expected = measured(2, LAB.solution / "zero.py"), formula(2)
    for stage, by_kind in expected.items():
        for kind in KINDS:
            assert kept[stage][kind] == pytest.approx(by_kind[kind], rel=0.01), (stage, kind)
    assert [round(kept[stage]["sent"] / 4 / 0.5, 2) for stage in expected] == [2, 2, 3]
