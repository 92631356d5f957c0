"""Gathers the whole model before the first unit computes.

hint: one computes, the others must be released
"""


class Zero3(Zero3):  # noqa: F821
    def before_forward(self, unit):
        if unit is self.units[0]:
            for every in self.units:
                every.allocate()
                self.gather(every)
