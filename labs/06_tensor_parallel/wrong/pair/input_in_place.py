"""All-reduces the partial result itself.

hint: changed the tensor x
"""

# ruff: noqa: F821


class Leave(Leave):
    @staticmethod
    def forward(ctx, x):
        y = x.detach()
        dist.all_reduce(y)
        return y.clone()
