"""Waits for step(), like stage 1: the whole gradients pile up.

hint: of whole gradients
"""


class Zero2(Zero2):  # noqa: F821
    def after_backward(self, unit):
        pass

    def step(self):
        for unit in self.units:
            unit.shard.grad = self.mean_gradient(unit)
            unit.forget_gradients()
        super().step()
