"""g hands the partial result on.

hint: It is this rank's own part
"""

# ruff: noqa: F821


class Leave(Leave):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
