"""The scale only ever shrinks.

hint: should have grown
"""


class LossScaler(LossScaler):  # noqa: F821
    def update(self, overflow):
        if overflow:
            self.scale *= self.backoff_factor
