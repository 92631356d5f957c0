"""The shards' gradients are never set to None: they grow from step to step.

hint: are the gradients of a step forgotten
"""


class Zero2(Zero2):  # noqa: F821
    def step(self):
        self.optimizer.step()
        for unit in self.units:
            self.gather(unit)
