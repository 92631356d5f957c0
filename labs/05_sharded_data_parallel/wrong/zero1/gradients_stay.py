"""The whole gradients are not forgotten, so the next step adds to them.

hint: are the gradients of a step forgotten
"""


class Zero1(Zero1):  # noqa: F821
    def step(self):
        for unit in self.units:
            unit.shard.grad = self.mean_gradient(unit)
        self.optimizer.step()
        for unit in self.units:
            self.gather(unit)
