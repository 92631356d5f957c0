"""Lets the parameters point to the masters.

hint: parameters are float32
"""


class MasterWeights(MasterWeights):  # noqa: F821
    def step(self):
        super().step()
        for parameter, master in zip(self.parameters, self.masters):
            parameter.data = master
