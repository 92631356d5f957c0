"""Averages the gradient, as data parallelism does.

hint: It is the mean over the ranks
"""

# ruff: noqa: F821


class Enter(Enter):
    @staticmethod
    def backward(ctx, dy):
        dx = dy.contiguous().clone()
        dist.all_reduce(dx)
        return dx / dist.get_world_size()
