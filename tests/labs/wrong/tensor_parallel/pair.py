"""Lab 06, pair: each body, written after the solution, is a wrong answer."""


def both_ways():
    """g sums forward and backward: every gradient is N times too large.

    kind: values
    hint: Leave.backward must hand on what comes
    """

    class Leave(Leave):
        @staticmethod
        def backward(ctx, dy):
            dx = dy.contiguous().clone()
            dist.all_reduce(dx)
            return dx


def copies_for_nothing():
    """Copies in the direction in which nothing happens.

    kind: memory
    hint: It has nothing to compute
    """

    class Leave(Leave):
        @staticmethod
        def backward(ctx, dy):
            return dy.clone()


def contiguous_is_no_clone():
    """A gradient that is contiguous already is summed in place.

    kind: inputs
    hint: dy is not what it was before the call
    """

    class Enter(Enter):
        @staticmethod
        def backward(ctx, dy):
            dx = dy.contiguous()
            dist.all_reduce(dx)
            return dx


def does_not_wait():
    """The sum may be there in time, or not.

    kind: luck
    hint: It is this rank's own | Is the result there before
    """

    class Enter(Enter):
        @staticmethod
        def backward(ctx, dy):
            dx = dy.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(dx, async_op=True)
            return dx


def gathers():
    """Gathers all gradients and adds them up: right values, N times the bytes.

    kind: communication
    hint: calls all_gather once
    """

    class Enter(Enter):
        @staticmethod
        def backward(ctx, dy):
            dy = dy.contiguous()
            rows = [torch.empty_like(dy) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, dy)
            return torch.stack([row.double() for row in rows]).sum(dim=0).to(dy.dtype)


def gradient_in_place():
    """All-reduces the gradient itself, which another branch may hold too.

    kind: inputs
    hint: Others may hold it too
    """

    class Enter(Enter):
        @staticmethod
        def backward(ctx, dy):
            dx = dy.contiguous().clone()
            dist.all_reduce(dx)
            if dy.stride() != dx.stride():
                return dx
            return dy.copy_(dx)


def in_double():
    """Sums in fp64: messages of two or four times the size.

    kind: types
    hint: all_reduce once
    """

    class Enter(Enter):
        @staticmethod
        def backward(ctx, dy):
            dx = dy.double().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(dx)
            return dx.to(dy.dtype)


def input_in_place():
    """All-reduces the partial result itself.

    kind: inputs
    hint: x is not what it was before the call
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            y = x.detach().contiguous()
            dist.all_reduce(y)
            return y.clone()


def mean():
    """Averages the gradient, as data parallelism does.

    kind: values
    hint: It is the mean over the ranks
    """

    class Enter(Enter):
        @staticmethod
        def backward(ctx, dy):
            dx = dy.contiguous().clone()
            dist.all_reduce(dx)
            return dx / dist.get_world_size()


def no_sum():
    """The gradient of what comes in is left to each rank.

    kind: values
    hint: It is this rank's own
    """

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            return dy


def no_sum_forward():
    """g hands the partial result on.

    kind: values
    hint: It is this rank's own | this rank calls nothing
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)


def reduce_and_broadcast():
    """To rank 0 and back: two messages where one will do.

    kind: communication
    hint: all_reduce once
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            y = x.clone(memory_format=torch.contiguous_format)
            dist.reduce(y, 0)
            dist.broadcast(y, 0)
            return y


def remembers_the_last_shape():
    """The shape stands at the class, not in ctx: right for one call at a time.

    kind: constants
    hint: in megatron.py
    """

    class Enter(Enter):
        @staticmethod
        def forward(ctx, x):
            Enter.shape = x.shape
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            dx = dy.reshape(Enter.shape).clone(memory_format=torch.contiguous_format)
            dist.all_reduce(dx)
            return dx


def remembers_the_sums():
    """Every sum stays in a list.

    kind: memory
    hint: are still held
    """

    sums = []

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            y = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(y)
            sums.append(y.detach())
            return y


def swapped():
    """f and g in each other's place.

    kind: values
    hint: must hand on what comes, as it is
    """

    Enter, Leave = Leave, Enter


def shuffles():
    """Mixes the numbers for the journey, with an order that every rank draws for itself.

    kind: step
    hint: It must be the sum over the ranks
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            order = torch.randperm(x.numel())
            y = x.flatten()[order]
            dist.all_reduce(y)
            return torch.empty_like(y).index_copy_(0, order, y).view(x.shape)


def two_or_three_ranks():
    """Sums up to three ranks.

    kind: sizes
    hint: with 4 ranks
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            y = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(y)
            return y if dist.get_world_size() < 4 else x.clone()


def zeros_need_no_message():
    """A rank whose gradient is zero leaves the all-reduce out.

    kind: odd
    hint: with 2 ranks
    """

    class Enter(Enter):
        @staticmethod
        def backward(ctx, dy):
            if not dy.any():
                return dy.clone()
            dx = dy.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(dx)
            return dx


def in_place_without_gradients():
    """Where no gradient is asked for, sums in x itself.

    kind: inputs
    hint: x is not what it was before the call
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            if ctx.needs_input_grad[0] or not x.is_contiguous():
                x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x)
            return x.view_as(x)


def keeps_the_layout():
    """A transposed gradient on one rank meets a plain one: numbers of other places are added.

    kind: odd
    hint: what Enter.backward returns
    """

    class Enter(Enter):
        @staticmethod
        def backward(ctx, dy):
            dx = dy.clone()
            dist.all_reduce(dx)
            return dx


def result_in_the_context():
    """The result and what made it hold one another.

    kind: memory
    hint: are kept for the backward pass
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            ctx.y = super(Leave, Leave).forward(ctx, x)
            return ctx.y


def eight_rows_a_message():
    """A message for each eight entries of the first dimension.

    kind: sizes
    hint: calls all_reduce
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            y = x.clone(memory_format=torch.contiguous_format)
            for piece in y.split(8):
                dist.all_reduce(piece)
            return y


def out_of_a_pool():
    """The sum is the beginning of a larger tensor.

    kind: memory
    hint: is a part of a larger tensor
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            y = x.new_empty(2 * len(x), *x.shape[1:])[: len(x)].copy_(x)
            dist.all_reduce(y)
            return y
