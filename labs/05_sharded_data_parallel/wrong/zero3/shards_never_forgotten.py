"""The shards' gradients stay after the step.

hint: are the gradients of a step forgotten
"""


class Zero3(Zero3):  # noqa: F821
    def step(self):
        self.optimizer.step()
