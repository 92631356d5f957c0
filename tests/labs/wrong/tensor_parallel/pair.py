"""Lab 06, pair: each body, written after the solution, is a wrong answer."""


def both_ways():
    """g sums forward and backward: every gradient is N times too large.

    hint: adds it up over the ranks
    """

    class Leave(Leave):
        @staticmethod
        def backward(ctx, dy):
            dx = dy.contiguous().clone()
            dist.all_reduce(dx)
            return dx


def gathers():
    """Gathers all gradients and adds them up: right values, N times the bytes.

    hint: one all-reduce will do
    """

    class Enter(Enter):
        @staticmethod
        def backward(ctx, dy):
            dy = dy.contiguous()
            rows = [torch.empty_like(dy) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, dy)
            dist.barrier()
            return torch.stack(rows).sum(dim=0)


def gradient_in_place():
    """All-reduces the gradient itself, which another branch may hold too.

    hint: changed the tensor dy
    """

    class Enter(Enter):
        @staticmethod
        def backward(ctx, dy):
            total = dy.contiguous().clone()
            dist.all_reduce(total)
            return dy.copy_(total)


def input_in_place():
    """All-reduces the partial result itself.

    hint: changed the tensor x
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            y = x.detach()
            dist.all_reduce(y)
            return y.clone()


def mean():
    """Averages the gradient, as data parallelism does.

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

    hint: All ranks used x
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

    hint: It is this rank's own part
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)


def swapped():
    """f and g in each other's place.

    hint: must hand x on as it is
    """

    Enter, Leave = Leave, Enter
