"""Lab 06, mlp: each body, written after the solution, is a wrong answer."""


def a_view():
    """The part is a view of the whole matrix, which stays in memory.

    kind: memory
    hint: is a view
    """

    def column(linear, sizes):
        weight, bias = part(linear.weight.data, 0, sizes), part(linear.bias.data, 0, sizes)
        return as_linear(weight, bias)


def bias_before_the_sum():
    """Each rank adds its share of the bias: right output, and each has a share of its gradient.

    kind: part
    hint: the gradient of down_proj.bias
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            x = Enter.apply(x)
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
            bias = self.down_proj.bias / dist.get_world_size()
            return Leave.apply(F.linear(hidden, self.down_proj.weight, bias))


def bias_on_every_rank():
    """Each rank adds the bias to its partial result: it counts N times.

    kind: values
    hint: has the bias of the row layer 2 times
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            x = Enter.apply(x)
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
            return Leave.apply(self.down_proj(hidden))


def cuts_the_whole_layer():
    """The part is put back into the layer that was given.

    kind: inputs
    hint: the whole layer is not what it was
    """

    def column(linear, sizes):
        weight, bias = part(linear.weight.data, 0, sizes), part(linear.bias.data, 0, sizes)
        linear.weight.data, linear.bias.data = weight.clone(), bias.clone()
        return linear


def equal_parts():
    """Cuts as chunk does, not as sizes say.

    kind: sizes
    hint: this rank's part
    """

    def column(linear, sizes):
        chunks = [
            t.tensor_split(len(sizes))[dist.get_rank()].clone()
            for t in (linear.weight.data, linear.bias.data)
        ]
        return as_linear(*chunks)


def everything_everywhere():
    """Nothing is cut; every rank computes the whole layer.

    kind: memory
    hint: and this rank's part is
    """

    def column(linear, sizes):
        return as_linear(linear.weight.data.clone(), linear.bias.data.clone())

    row = column


def f_for_each_matrix():
    """x enters twice, so its gradient is summed in two messages.

    kind: communication
    hint: all_reduce 2 times
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            gate, up = self.gate_proj(Enter.apply(x)), self.up_proj(Enter.apply(x))
            y = Leave.apply(F.linear(F.silu(gate) * up, self.down_proj.weight))
            return y + self.down_proj.bias


def first_part_everywhere():
    """Every rank takes the first part.

    kind: values
    hint: this rank's part
    """

    def column(linear, sizes):
        first = sizes[dist.get_rank()]
        return as_linear(linear.weight.data[:first].clone(), linear.bias.data[:first].clone())


def in_single_precision():
    """The parts are fp32, whatever the layer is.

    kind: types
    hint: to the bit
    """

    def column(linear, sizes):
        weight, bias = part(linear.weight.data, 0, sizes), part(linear.bias.data, 0, sizes)
        return as_linear(weight.clone().float(), bias.clone().float())


def joins_once():
    """Gate and up are joined in the first pass, and never again.

    kind: constants
    hint: the output
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            if not hasattr(self, "joined"):
                both = torch.cat((self.gate_proj.weight, self.up_proj.weight))
                biases = torch.cat((self.gate_proj.bias, self.up_proj.bias))
                self.joined = [both, biases]
            gate, up = F.linear(Enter.apply(x), *self.joined).chunk(2, dim=-1)
            y = Leave.apply(F.linear(F.silu(gate) * up, self.down_proj.weight))
            return y + self.down_proj.bias


def keeps_a_copy():
    """A copy of the whole matrix is kept beside the part.

    kind: memory
    hint: beside the parts stay in memory
    """

    class ParallelMLP(ParallelMLP):
        def __init__(self, mlp):
            super().__init__(mlp)
            self.before = {"up": mlp.up_proj.weight.detach().clone()}


def keeps_the_whole():
    """The whole layer is kept beside the part.

    kind: memory
    hint: beside the parts stay in memory
    """

    class ParallelMLP(ParallelMLP):
        def __init__(self, mlp):
            super().__init__(mlp)
            self.whole = [mlp]


def no_bias():
    """The bias of the row layer is forgotten.

    kind: values
    hint: It lacks the bias
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            x = Enter.apply(x)
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
            return Leave.apply(F.linear(hidden, self.down_proj.weight))


def no_f():
    """Forgets f: right output, and each rank has another gradient of x.

    kind: values
    hint: calls nothing
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
            y = Leave.apply(F.linear(hidden, self.down_proj.weight))
            return y + self.down_proj.bias


def no_g():
    """Forgets g: every rank goes on with its partial result.

    kind: values
    hint: they add up to the right one
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            x = Enter.apply(x)
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
            return self.down_proj(hidden)


def no_column_no_work():
    """A rank without columns does nothing, not even its part of the sum.

    kind: odd
    hint: with 3 ranks
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            if not len(self.gate_proj.bias):
                return x * 0 + self.down_proj.bias
            return super().forward(x)


def recomputes():
    """The hidden values are computed once more in the backward pass.

    kind: work
    hint: multiplications in the backward pass
    """

    from torch.utils.checkpoint import checkpoint

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            def hidden(x):
                return F.silu(self.gate_proj(x)) * self.up_proj(x)

            y = checkpoint(hidden, Enter.apply(x), use_reentrant=False)
            return Leave.apply(F.linear(y, self.down_proj.weight)) + self.down_proj.bias


def row_by_outputs():
    """Cuts the row layer along its outputs, too.

    kind: values
    hint: a row layer along its inputs
    """

    def row(linear, sizes):
        size = dist.get_world_size()
        weight = part(linear.weight.data, 0, shares(linear.out_features, size)).clone()
        return as_linear(weight, linear.bias.data)


def looks_twice():
    """The gate is computed twice.

    kind: work
    hint: multiplications in the forward pass
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            x = Enter.apply(x)
            gate, up = (p(x) for p in (self.gate_proj, self.up_proj))
            hidden = gate * torch.sigmoid(self.gate_proj(x)) * up
            return Leave.apply(F.linear(hidden, self.down_proj.weight)) + self.down_proj.bias


def bf16_in_single_precision():
    """Partial results of bf16 travel in fp32.

    kind: types
    hint: all_reduce once
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            x = Enter.apply(x)
            y = F.linear(F.silu(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight)
            wide = y.float() if y.element_size() < 4 else y
            return Leave.apply(wide).to(y.dtype) + self.down_proj.bias


def gathers_without_gradients():
    """An evaluation gathers all partial results: N times the bytes.

    kind: communication
    hint: forward without gradients: this rank calls all_gather once
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            if torch.is_grad_enabled():
                return super().forward(x)
            y = F.linear(F.silu(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight)
            pieces = [torch.empty_like(y) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, y)
            return sum(pieces) + self.down_proj.bias
