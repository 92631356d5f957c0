"""Keeps the parameters between forward and backward pass (FSDP calls this no reshard).

hint: of whole parameters are in memory after a forward pass
"""


class Zero3(Zero3):  # noqa: F821
    def after_forward(self, unit):
        pass

    def before_backward(self, unit):
        pass
