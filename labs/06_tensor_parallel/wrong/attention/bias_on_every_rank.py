"""The bias of o is added before the sum.

hint: add it after g
"""

# ruff: noqa: F821


class ParallelAttention(ParallelAttention):
    def forward(self, x, cos, sin):
        x = Enter.apply(x)
        y = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)
        return Leave.apply(self.o_proj(y))
