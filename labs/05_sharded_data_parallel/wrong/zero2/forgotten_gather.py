"""No gather at the end of the step.

hint: does every rank get every other rank's part
"""


class Zero2(Zero2):  # noqa: F821
    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
