"""Grows when there were more good steps than the interval.

hint: should have grown
"""


class LossScaler(LossScaler):  # noqa: F821
    def update(self, overflow):
        if overflow:
            self.scale *= self.backoff_factor
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps > self.growth_interval:
            self.scale *= self.growth_factor
            self.good_steps = 0
