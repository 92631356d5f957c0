"""Counts good steps, but an overflow does not start the counting anew.

hint: in a row
"""


class LossScaler(LossScaler):  # noqa: F821
    def update(self, overflow):
        if overflow:
            self.scale *= self.backoff_factor
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.good_steps = 0
