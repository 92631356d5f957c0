"""After the first growth it grows in every step.

hint: the counting begins anew
"""


class LossScaler(LossScaler):  # noqa: F821
    def update(self, overflow):
        if overflow:
            self.scale *= self.backoff_factor
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale *= self.growth_factor
