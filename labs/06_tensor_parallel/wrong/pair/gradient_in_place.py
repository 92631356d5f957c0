"""All-reduces the gradient itself, which another branch may hold too.

hint: changed the tensor dy
"""

# ruff: noqa: F821


class Enter(Enter):
    @staticmethod
    def backward(ctx, dy):
        total = dy.contiguous().clone()
        dist.all_reduce(total)
        return dy.copy_(total)
