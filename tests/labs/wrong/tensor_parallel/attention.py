"""Lab 06, attention: each body, written after the solution, is a wrong answer."""


def all_see_all():
    """The mask is forgotten.

    kind: values
    hint: the output
    """

    class ParallelAttention(ParallelAttention):
        def attend(self, q, k, v, cos, sin):
            q, k, v = (t.unflatten(-1, (-1, self.head_size)) for t in (q, k, v))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
            return y.transpose(1, 2).flatten(2)


def bias_on_every_rank():
    """The bias of o is added before the sum.

    kind: values
    hint: has the bias of the row layer 2 times
    """

    class ParallelAttention(ParallelAttention):
        def forward(self, x, cos, sin):
            x = Enter.apply(x)
            y = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)
            return Leave.apply(self.o_proj(y))


def bias_in_shares():
    """Every rank adds its share of the bias: the gradient of the bias comes in shares, too.

    kind: part
    hint: the gradient of o_proj.bias
    """

    class ParallelAttention(ParallelAttention):
        def forward(self, x, cos, sin):
            x = Enter.apply(x)
            y = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)
            bias = self.o_proj.bias / dist.get_world_size()
            return Leave.apply(F.linear(y, self.o_proj.weight, bias))


def counts_heads_not_outputs():
    """Returns numbers of heads where numbers of outputs are asked for.

    kind: values
    hint: A rank has whole heads
    """

    def head_sizes(heads, kv_heads, head_size):
        keys = shares(kv_heads, dist.get_world_size())
        return tuple(n * heads // kv_heads for n in keys), keys


def f_three_times():
    """x enters once for each of q, k and v.

    kind: communication
    hint: all_reduce 3 times
    """

    class ParallelAttention(ParallelAttention):
        def forward(self, x, cos, sin):
            q, k, v = (p(Enter.apply(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
            y = self.attend(q, k, v, cos, sin)
            return Leave.apply(F.linear(y, self.o_proj.weight)) + self.o_proj.bias


def groups_of_two():
    """Two query heads for each key-value head, whatever was given.

    kind: constants
    hint: A rank has whole heads
    """

    def head_sizes(heads, kv_heads, head_size):
        keys = tuple(n * head_size for n in shares(kv_heads, dist.get_world_size()))
        return tuple(2 * n for n in keys), keys


def heads_are_cut():
    """Shares out columns, so that a head lies on two ranks.

    kind: sizes
    hint: A rank has whole heads
    """

    def head_sizes(heads, kv_heads, head_size):
        size = dist.get_world_size()
        return shares(heads * head_size, size), shares(kv_heads * head_size, size)


def in_single_precision():
    """Attention is computed in fp32.

    kind: types
    hint: in float64
    """

    class ParallelAttention(ParallelAttention):
        def attend(self, q, k, v, *tables):
            return super().attend(*(t.float() for t in (q, k, v, *tables))).to(q.dtype)


def keeps_the_whole():
    """The whole layer is kept beside the part.

    kind: memory
    hint: beside the parts stay in memory
    """

    class ParallelAttention(ParallelAttention):
        def __init__(self, attention):
            super().__init__(attention)
            self.whole = lambda: attention


def keeps_the_heads():
    """The heads of every pass are kept.

    kind: memory
    hint: are still held
    """

    class ParallelAttention(ParallelAttention):
        def attend(self, *given):
            self.heads = [*getattr(self, "heads", []), super().attend(*given).detach()]
            return super().attend(*given)


def keys_everywhere():
    """Every rank gets all key-value heads.

    kind: memory
    hint: A rank has whole heads
    """

    def head_sizes(heads, kv_heads, head_size):
        size = dist.get_world_size()
        keys = tuple(n * head_size for n in shares(kv_heads, size))
        return tuple(n * heads // kv_heads for n in keys), (kv_heads * head_size,) * size


def keys_without_gradient():
    """Keys are treated as constant: right output.

    kind: part
    hint: the gradient of
    """

    class ParallelAttention(ParallelAttention):
        def attend(self, q, k, v, cos, sin):
            return super().attend(q, k.detach() + 0 * k, v, cos, sin)


def no_f():
    """Forgets f: right output, wrong gradient of x.

    kind: values
    hint: calls nothing
    """

    class ParallelAttention(ParallelAttention):
        def forward(self, x, cos, sin):
            y = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)
            return Leave.apply(F.linear(y, self.o_proj.weight)) + self.o_proj.bias


def queries_shared_out_alone():
    """Shares out the query heads without looking at the key-value heads.

    kind: sizes
    hint: the query heads that attend to its key-value heads
    """

    def head_sizes(heads, kv_heads, head_size):
        size = dist.get_world_size()
        queries, keys = shares(heads, size), shares(kv_heads, size)
        return tuple(n * head_size for n in queries), tuple(n * head_size for n in keys)


def takes_and_wipes():
    """What was taken is wiped out in the whole layer, to save memory.

    kind: inputs
    hint: q_proj.weight is not what it was
    """

    class ParallelAttention(ParallelAttention):
        def __init__(self, attention):
            super().__init__(attention)
            attention.q_proj.weight.data.zero_()


def sums_late():
    """Does not wait for the sum.

    kind: luck
    hint: the output
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            y = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(y, async_op=True)
            return y


def two_sums():
    """The result is summed in two halves.

    kind: communication
    hint: all_reduce 2 times
    """

    class ParallelAttention(ParallelAttention):
        def forward(self, x, cos, sin):
            x = Enter.apply(x)
            y = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)
            y = F.linear(y, self.o_proj.weight)
            halves = y.tensor_split(2, dim=1)
            return torch.cat([Leave.apply(half) for half in halves], dim=1) + self.o_proj.bias


def groups_of_eight():
    """At most eight query heads for a key-value head.

    kind: sizes
    hint: head_sizes(
    """

    _head_sizes = head_sizes

    def head_sizes(heads, kv_heads, head_size):
        return _head_sizes(min(heads, 8 * kv_heads), kv_heads, head_size)


def one_position_is_easy():
    """Hands v on where there is one position, repeated in the wrong order.

    kind: sizes
    hint: the output
    """

    class ParallelAttention(ParallelAttention):
        def attend(self, q, k, v, cos, sin):
            if q.shape[1] > 1 or not v.shape[-1]:
                return super().attend(q, k, v, cos, sin)
            return v.repeat(1, 1, q.shape[-1] // v.shape[-1]) + 0 * q + 0 * k.sum()


def the_course_under_another_name():
    """f and g are the course's, by a name that stands nowhere.

    kind: library
    hint: that is the library
    """

    import importlib

    class ParallelAttention(ParallelAttention):
        def forward(self, x, cos, sin):
            ops = importlib.import_module(".".join(["utils", "parallel", "tp_ops"]))
            x = ops._CopyToRegion.apply(x, None)
            y = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)
            y = F.linear(y, self.o_proj.weight)
            return ops._ReduceFromRegion.apply(y, None) + self.o_proj.bias
