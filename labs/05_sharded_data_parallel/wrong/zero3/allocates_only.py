"""Gets the memory back and does not fill it.

hint: NaN
"""


class Zero3(Zero3):  # noqa: F821
    def before_forward(self, unit):
        unit.allocate()
