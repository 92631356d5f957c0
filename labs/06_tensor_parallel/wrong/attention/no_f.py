"""Forgets f: right output, wrong gradient of x.

hint: the gradient of x is not
"""

# ruff: noqa: F821


class ParallelAttention(ParallelAttention):
    def forward(self, x, cos, sin):
        y = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)
        return Leave.apply(F.linear(y, self.o_proj.weight)) + self.o_proj.bias
