"""g sums forward and backward: every gradient is N times too large.

hint: adds it up over the ranks
"""

# ruff: noqa: F821


class Leave(Leave):
    @staticmethod
    def backward(ctx, dy):
        dx = dy.contiguous().clone()
        dist.all_reduce(dx)
        return dx
