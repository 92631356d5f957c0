"""Lab 06, mlp: each body, written after the solution, is a wrong answer."""


def a_view():
    """The part is a view of the whole matrix, which stays in memory.

    hint: is a view
    """

    def column(linear, sizes):
        weight, bias = part(linear.weight.data, 0, sizes), part(linear.bias.data, 0, sizes)
        return as_linear(weight, bias)


def bias_on_every_rank():
    """Each rank adds the bias to its partial result: it counts N times.

    hint: add it after g
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            x = Enter.apply(x)
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
            return Leave.apply(self.down_proj(hidden))


def everything_everywhere():
    """Nothing is cut; every rank computes the whole layer.

    hint: and this rank's part is
    """

    def column(linear, sizes):
        return as_linear(linear.weight.data.clone(), linear.bias.data.clone())

    row = column


def f_for_each_matrix():
    """x enters twice, so its gradient is summed in two messages.

    hint: 2 messages in the backward pass
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            gate, up = self.gate_proj(Enter.apply(x)), self.up_proj(Enter.apply(x))
            y = Leave.apply(F.linear(F.silu(gate) * up, self.down_proj.weight))
            return y + self.down_proj.bias


def first_part_everywhere():
    """Every rank takes the first part.

    hint: holds another rank's part
    """

    def column(linear, sizes):
        first = sizes[dist.get_rank()]
        return as_linear(linear.weight.data[:first].clone(), linear.bias.data[:first].clone())


def no_bias():
    """The bias of the row layer is forgotten.

    hint: add it after g
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            x = Enter.apply(x)
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
            return Leave.apply(F.linear(hidden, self.down_proj.weight))


def no_f():
    """Forgets f: right output, and each rank has another gradient of x.

    hint: the gradient of x is not
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
            y = Leave.apply(F.linear(hidden, self.down_proj.weight))
            return y + self.down_proj.bias


def no_g():
    """Forgets g: every rank goes on with its partial result.

    hint: each rank has another output
    """

    class ParallelMLP(ParallelMLP):
        def forward(self, x):
            x = Enter.apply(x)
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
            return self.down_proj(hidden)


def row_by_outputs():
    """Cuts the row layer along its outputs, too.

    hint: a row layer along its inputs
    """

    def row(linear, sizes):
        size = dist.get_world_size()
        weight = part(linear.weight.data, 0, shares(linear.out_features, size)).clone()
        return as_linear(weight, linear.bias.data)
