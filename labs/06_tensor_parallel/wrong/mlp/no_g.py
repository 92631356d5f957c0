"""Forgets g: every rank goes on with its partial result.

hint: each rank has another output
"""

# ruff: noqa: F821


class ParallelMLP(ParallelMLP):
    def forward(self, x):
        x = Enter.apply(x)
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden)
