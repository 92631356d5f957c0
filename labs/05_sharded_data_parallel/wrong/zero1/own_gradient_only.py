"""Takes its part of its own gradients: what the other ranks have learned is lost.

hint: is it the mean over all ranks
"""


class Zero1(Zero1):  # noqa: F821
    def mean_gradient(self, unit):
        return unit.parts(unit.gradients())[self.rank].clone()
