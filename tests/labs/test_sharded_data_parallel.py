"""Lab 05: the answers that its checks must accept and reject, and its pieces."""

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "05_sharded_data_parallel",
    {name: ("check_zero", name, "zero.py") for name in ("zero1", "zero2", "zero3")},
    {"utils.course.trial.HANG": 10.0},  # two answers are judged at once
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
    "zero1: asynchronous, waited for": """
class Zero1(Zero1):
    def step(self):
        works = []
        for unit in self.units:
            flat, mine = unit.gradients() / self.size, torch.empty_like(unit.shard)
            works.append((unit, mine, dist.reduce_scatter(mine, unit.parts(flat), async_op=True)))
            unit.forget_gradients()
        for unit, mine, work in works:
            work.wait()
            unit.shard.grad = mine
        self.optimizer.step()
        self.optimizer.zero_grad()
        parts = [dist.all_gather(u.parts(), u.shard.data, async_op=True) for u in self.units]
        for work in parts:
            work.wait()
""",
    "zero1: tensors for lists, no message of one rank": """
class Zero1(Zero1):
    def own_part(self, unit):
        return unit.flat[self.rank * unit.length : (self.rank + 1) * unit.length]

    def mean_gradient(self, unit):
        flat = unit.gradients()
        if self.size == 1:
            return flat
        mine = unit.flat.new_zeros(unit.length)
        dist.reduce_scatter_single(mine, flat)
        return mine.mul_(1 / self.size)

    def gather(self, unit):
        if self.size > 1:
            dist.all_gather_single(unit.flat, unit.shard.detach().clone())
""",
    "zero2: one reduction in flight": """
class Zero2(Zero2):
    flying = None

    def land(self):
        if self.flying:
            unit, mine, work = self.flying
            work.wait()
            grad = unit.shard.grad
            unit.shard.grad = mine / self.size + (0 if grad is None else grad)
            self.flying = None

    def after_backward(self, unit):
        self.land()
        flat, mine = unit.gradients(), torch.empty_like(unit.shard)
        self.flying = unit, mine, dist.reduce_scatter(mine, unit.parts(flat), async_op=True)
        unit.forget_gradients()
        if unit is self.units[0]:
            self.land()
""",
    "zero2: divides first, by all-to-all": """
class Zero2(Zero2):
    def mean_gradient(self, unit):
        mine = unit.gradients().div_(self.size)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine)
        return theirs.view(self.size, -1).sum(dim=0)

    def step(self):
        self.optimizer.step()
        for unit in reversed(self.units):
            self.gather(unit)
            unit.shard.grad = None
""",
    "zero2: sums, and divides in step": """
class Zero2(Zero2):
    def after_backward(self, unit):
        mine = torch.empty_like(unit.shard)
        dist.reduce_scatter(mine, unit.parts(unit.gradients()))
        unit.forget_gradients()
        unit.shard.grad = mine if unit.shard.grad is None else unit.shard.grad.add_(mine)

    def step(self):
        for unit in self.units:
            unit.shard.grad /= self.size
        super().step()
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
    "zero3: asynchronous, waited for": """
class Zero3(Zero3):
    def gather(self, unit):
        dist.all_gather(unit.parts(), unit.shard.data, async_op=True).wait()

    def after_backward(self, unit):
        unit.release()
        super().after_backward(unit)
""",
    "zero3: into one tensor": """
class Zero3(Zero3):
    def own_part(self, unit):
        return torch.tensor_split(unit.flat, self.size)[self.rank].detach().clone()

    def gather(self, unit):
        everyone = torch.empty_like(unit.flat)
        dist.all_gather_single(everyone, unit.shard.detach())
        unit.flat.copy_(everyone)

    def step(self):
        self.optimizer.step()
        for unit in self.units:
            unit.shard.grad = None
""",
    "zero3: the last unit is whole for a moment only": """
class Zero3(Zero3):
    def before_forward(self, unit):
        unit.allocate()
        dist.all_gather(list(unit.flat.chunk(self.size)), unit.shard.data)

    def before_backward(self, unit):
        self.before_forward(unit)

    def after_backward(self, unit):
        part = self.mean_gradient(unit)
        unit.release()
        unit.forget_gradients()
        if unit.shard.grad is not None:
            part += unit.shard.grad
        unit.shard.grad = part
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 75, (12, 6, 4)
    untouched = ("zero1",)


def test_the_formula_is_what_is_measured():
    from labs.support.sharded_data_parallel.measurements import KINDS, formula, measured

    kept, expected = measured(2, LAB.solution / "zero.py"), formula(2)
    for stage, by_kind in expected.items():
        for kind in KINDS:
            assert kept[stage][kind] == pytest.approx(by_kind[kind], rel=0.01), (stage, kind)
    assert [round(kept[stage]["sent"] / 4 / 0.5, 2) for stage in expected] == [2, 2, 3]
