"""Lab 06, attention: each body, written after the solution, is a wrong answer."""


def bias_on_every_rank():
    """The bias of o is added before the sum.

    hint: add it after g
    """

    class ParallelAttention(ParallelAttention):
        def forward(self, x, cos, sin):
            x = Enter.apply(x)
            y = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)
            return Leave.apply(self.o_proj(y))


def counts_heads_not_outputs():
    """Returns numbers of heads where numbers of outputs are asked for.

    hint: A rank has whole heads
    """

    def head_sizes(heads, kv_heads, head_size):
        keys = shares(kv_heads, dist.get_world_size())
        return tuple(n * heads // kv_heads for n in keys), keys


def f_three_times():
    """x enters once for each of q, k and v.

    hint: 3 messages in the backward pass
    """

    class ParallelAttention(ParallelAttention):
        def forward(self, x, cos, sin):
            q, k, v = (p(Enter.apply(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
            y = self.attend(q, k, v, cos, sin)
            return Leave.apply(F.linear(y, self.o_proj.weight)) + self.o_proj.bias


def heads_are_cut():
    """Shares out columns, so that a head lies on two ranks.

    hint: A rank has whole heads
    """

    def head_sizes(heads, kv_heads, head_size):
        size = dist.get_world_size()
        return shares(heads * head_size, size), shares(kv_heads * head_size, size)


def keys_everywhere():
    """Every rank gets all key-value heads.

    hint: A rank has whole heads
    """

    def head_sizes(heads, kv_heads, head_size):
        size = dist.get_world_size()
        keys = tuple(n * head_size for n in shares(kv_heads, size))
        return tuple(n * heads // kv_heads for n in keys), (kv_heads * head_size,) * size


def no_f():
    """Forgets f: right output, wrong gradient of x.

    hint: the gradient of x is not
    """

    class ParallelAttention(ParallelAttention):
        def forward(self, x, cos, sin):
            y = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)
            return Leave.apply(F.linear(y, self.o_proj.weight)) + self.o_proj.bias


def queries_shared_out_alone():
    """Shares out the query heads without looking at the key-value heads.

    hint: the query heads that attend to its key-value heads
    """

    def head_sizes(heads, kv_heads, head_size):
        size = dist.get_world_size()
        queries, keys = shares(heads, size), shares(kv_heads, size)
        return tuple(n * head_size for n in queries), tuple(n * head_size for n in keys)
