"""A second backward pass overwrites what the first one left.

hint: the gradients of several backward passes must add up
"""


class Zero2(Zero2):  # noqa: F821
    def after_backward(self, unit):
        unit.shard.grad = self.mean_gradient(unit)
        unit.forget_gradients()
