"""Keeps the parameters after the forward pass and gathers them again all the same.

hint: of whole parameters are in memory
"""


class Zero3(Zero3):  # noqa: F821
    def after_forward(self, unit):
        pass
