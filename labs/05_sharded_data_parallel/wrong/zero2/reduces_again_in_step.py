"""Reduces in the backward pass, and once more in step(), as stage 1 does.

hint: did not change
"""


class Zero2(Zero2):  # noqa: F821
    def step(self):
        for unit in self.units:
            unit.shard.grad = self.mean_gradient(unit)
        super().step()
