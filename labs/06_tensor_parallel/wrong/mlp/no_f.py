"""Forgets f: right output, and each rank has another gradient of x.

hint: the gradient of x is not
"""

# ruff: noqa: F821


class ParallelMLP(ParallelMLP):
    def forward(self, x):
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        y = Leave.apply(F.linear(hidden, self.down_proj.weight))
        return y + self.down_proj.bias
