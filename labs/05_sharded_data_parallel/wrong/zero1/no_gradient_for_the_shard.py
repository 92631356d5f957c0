"""The mean gradient goes nowhere: the optimizer skips parameters without .grad.

hint: does the optimizer find a gradient
"""


class Zero1(Zero1):  # noqa: F821
    def step(self):
        for unit in self.units:
            unit.gradient = self.mean_gradient(unit)
            unit.forget_gradients()
        self.optimizer.step()
        for unit in self.units:
            self.gather(unit)
