"""Gathers without getting the memory back first.

hint: allocate() first
"""


class Zero3(Zero3):  # noqa: F821
    def before_forward(self, unit):
        self.gather(unit)
