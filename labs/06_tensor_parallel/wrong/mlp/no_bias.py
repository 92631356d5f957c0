"""The bias of the row layer is forgotten.

hint: add it after g
"""

# ruff: noqa: F821


class ParallelMLP(ParallelMLP):
    def forward(self, x):
        x = Enter.apply(x)
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return Leave.apply(F.linear(hidden, self.down_proj.weight))
