"""Lab 08, halves: each body, written after the solution, is a wrong answer."""


def computes_at_once():
    """Adds the weight's gradient in B.

    hint: has a gradient already
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            with torch.no_grad():
                rows = gradient.flatten(0, -2)
                accumulate(ctx.weight, rows.t() @ x.flatten(0, -2))
            return gradient @ ctx.weight, None, None, None


def everything_later():
    """Leaves the gradient of x for later too.

    hint: there is no gradient of x
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            ctx.waiting.append(lambda: None)
            return None, None, None, None


def forgets_the_bias():
    """Forgets the bias.

    hint: no gradient of the bias
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors

            def add():
                accumulate(ctx.weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2))

            ctx.waiting.append(add)
            return gradient @ ctx.weight, None, None, None


def nothing_waits():
    """Returns the gradient of x and forgets the rest.

    hint: nothing waits
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            return gradient @ ctx.weight, None, None, None


def overwrites():
    """Each micro-batch replaces the gradient of the one before.

    hint: is it the sum of both?
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors

            def add():
                rows = gradient.flatten(0, -2)
                ctx.weight.grad = rows.t() @ x.flatten(0, -2)
                if ctx.bias is not None:
                    ctx.bias.grad = rows.sum(dim=0)

            ctx.waiting.append(add)
            return gradient @ ctx.weight, None, None, None


def returns_the_weights_too():
    """Returns the weight's gradient to autograd, which adds it in B.

    hint: has a gradient already
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            ctx.waiting.append(lambda: None)
            of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
            return gradient @ ctx.weight, of_weight, None, None


def rows_only():
    """Right for rows (tokens, in), not for sequences (B, T, in).

    hint: sequences
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors

            def add():
                accumulate(ctx.weight, gradient.transpose(-1, -2) @ x)
                if ctx.bias is not None:
                    accumulate(ctx.bias, gradient.sum(dim=0))

            ctx.waiting.append(add)
            return gradient @ ctx.weight, None, None, None
