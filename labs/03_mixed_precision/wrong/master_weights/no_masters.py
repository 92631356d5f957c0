"""The masters are the bf16 parameters themselves.

hint: bfloat16, not float32
"""


class MasterWeights(MasterWeights):  # noqa: F821
    def copies(self):
        return [parameter.detach() for parameter in self.parameters]
