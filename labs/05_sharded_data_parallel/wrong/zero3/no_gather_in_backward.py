"""Believes that the backward pass finds the parameters of the forward pass.

hint: before_backward must gather them
"""


class Zero3(Zero3):  # noqa: F821
    def before_backward(self, unit):
        pass
