"""Adds to the shard and keeps the whole gradients: the next backward pass counts them again.

hint: none must count twice
"""


class Zero2(Zero2):  # noqa: F821
    def after_backward(self, unit):
        part = self.mean_gradient(unit)
        unit.shard.grad = part if unit.shard.grad is None else unit.shard.grad + part

    def step(self):
        for unit in self.units:
            unit.forget_gradients()
        super().step()
