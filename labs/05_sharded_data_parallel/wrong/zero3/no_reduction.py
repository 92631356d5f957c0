"""Releases after the backward pass and forgets what stage 2 does there.

hint: does the optimizer find a gradient
"""


class Zero3(Zero3):  # noqa: F821
    def after_backward(self, unit):
        unit.release()
