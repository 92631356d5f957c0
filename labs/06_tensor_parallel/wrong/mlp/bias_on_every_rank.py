"""Each rank adds the bias to its partial result: it counts N times.

hint: add it after g
"""

# ruff: noqa: F821


class ParallelMLP(ParallelMLP):
    def forward(self, x):
        x = Enter.apply(x)
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return Leave.apply(self.down_proj(hidden))
