"""x enters once for each of q, k and v.

hint: 3 messages in the backward pass
"""

# ruff: noqa: F821


class ParallelAttention(ParallelAttention):
    def forward(self, x, cos, sin):
        q, k, v = (p(Enter.apply(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = self.attend(q, k, v, cos, sin)
        return Leave.apply(F.linear(y, self.o_proj.weight)) + self.o_proj.bias
