"""Reduces early, and keeps the whole gradients until the step.

hint: of whole gradients
"""


class Zero2(Zero2):  # noqa: F821
    def after_backward(self, unit):
        part = self.mean_gradient(unit)
        unit.shard.grad = part

    def step(self):
        for unit in self.units:
            unit.forget_gradients()
        super().step()
