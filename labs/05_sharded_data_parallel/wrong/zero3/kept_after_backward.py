"""Nothing is released after the backward pass.

hint: of whole parameters are in memory in the backward pass
"""


class Zero3(Zero3):  # noqa: F821
    def after_backward(self, unit):
        Zero2.after_backward(self, unit)  # noqa: F821
