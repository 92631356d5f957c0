"""Lab 08, halves: each body, written after the solution, is a wrong answer."""


def computes_at_once():
    """Adds the weight's gradient in B.

    kind: work
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

    kind: part
    hint: there is no gradient of x
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            ctx.waiting.append(lambda: None)
            return None, None, None, None


def forgets_the_bias():
    """Forgets the bias.

    kind: part
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

    kind: part
    hint: nothing waits
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            return gradient @ ctx.weight, None, None, None


def overwrites():
    """Each micro-batch replaces the gradient of the one before.

    kind: values
    hint: Is it the sum of both
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

    kind: work
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

    kind: sizes
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


def product_in_b():
    """Computes W's product in B, and only adds it later.

    kind: work
    hint: B of micro-batch 0 does matrix products
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            weight, bias, rows = ctx.weight, ctx.bias, gradient.flatten(0, -2)
            of_weight = rows.t() @ x.detach().flatten(0, -2)

            def add():
                accumulate(weight, of_weight)
                if bias is not None:
                    accumulate(bias, rows.sum(dim=0))

            ctx.waiting.append(add)
            return gradient @ weight, None, None, None


def graph_on_the_gradient():
    """Forgets that x has a history.

    kind: memory
    hint: it keeps a graph from step to step
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            weight, bias = ctx.weight, ctx.bias

            def add():
                rows = gradient.flatten(0, -2)
                accumulate(weight, rows.t() @ x.flatten(0, -2))
                if bias is not None:
                    accumulate(bias, rows.sum(dim=0))

            ctx.waiting.append(add)
            return gradient @ weight, None, None, None


def never_lets_go():
    """A list of the module holds what W needs.

    kind: memory
    hint: bytes are still held after W
    """

    every = []

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            found = super(LaterLinear, LaterLinear).backward(ctx, gradient)
            every.append(ctx.waiting[-1])
            return found


def saved_too_late():
    """Takes the saved tensors out in W.

    kind: step
    hint: take them out then
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            weight, bias = ctx.weight, ctx.bias

            @torch.no_grad()
            def add():
                (x,) = ctx.saved_tensors
                rows = gradient.flatten(0, -2)
                accumulate(weight, rows.t() @ x.flatten(0, -2))
                if bias is not None:
                    accumulate(bias, rows.sum(dim=0))

            ctx.waiting.append(add)
            return gradient @ weight, None, None, None


def in_float32():
    """Adds in fp32, whatever the weights have.

    kind: types
    hint: the weight
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            weight, bias = ctx.weight, ctx.bias

            @torch.no_grad()
            def add():
                rows = gradient.flatten(0, -2).float()
                accumulate(weight, (rows.t() @ x.flatten(0, -2).float()).to(weight.dtype))
                if bias is not None:
                    accumulate(bias, rows.sum(dim=0).to(bias.dtype))

            ctx.waiting.append(add)
            return gradient @ weight, None, None, None


def empties_the_gradient():
    """Uses the gradient's memory for something else when W is done.

    kind: inputs
    hint: gradient is not what it was before the call
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            found = super(LaterLinear, LaterLinear).backward(ctx, gradient)
            add = ctx.waiting.pop()

            def and_empty():
                add()
                gradient.zero_()

            ctx.waiting.append(and_empty)
            return found


def in_place_of_what_was_there():
    """The first W of a step replaces the gradient.

    kind: values
    hint: and of what was there before?
    """

    seen = set()

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            found = super(LaterLinear, LaterLinear).backward(ctx, gradient)
            add, weight, bias = ctx.waiting.pop(), ctx.weight, ctx.bias

            def first():
                if weight not in seen:
                    seen.add(weight)
                    weight.grad = None
                    if bias is not None:
                        bias.grad = None
                add()

            ctx.waiting.append(first)
            return found


def view_of_rows():
    """Views as rows what need not lie so.

    kind: types
    hint: not contiguous
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            weight, bias = ctx.weight, ctx.bias

            @torch.no_grad()
            def add():
                rows = gradient.view(-1, gradient.shape[-1])
                accumulate(weight, rows.t() @ x.view(-1, x.shape[-1]))
                if bias is not None:
                    accumulate(bias, rows.sum(dim=0))

            ctx.waiting.append(add)
            return gradient @ weight, None, None, None


def mean_of_a_micro_batch():
    """Divides by the rows.

    kind: values
    hint: Is it the sum of both
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            found = super(LaterLinear, LaterLinear).backward(ctx, gradient)
            ctx.waiting[-1:] = []
            weight, bias = ctx.weight, ctx.bias

            @torch.no_grad()
            def add():
                rows = gradient.flatten(0, -2)
                accumulate(weight, rows.t() @ x.flatten(0, -2) / len(rows))
                if bias is not None:
                    accumulate(bias, rows.mean(dim=0))

            ctx.waiting.append(add)
            return found


def first_micro_batch_again():
    """Every W adds the first micro-batch's gradient.

    kind: constants
    hint: Is it the sum of both
    """

    first = {}

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            found = super(LaterLinear, LaterLinear).backward(ctx, gradient)
            add, weight = ctx.waiting.pop(), ctx.weight
            ctx.waiting.append(first.setdefault(weight, add))
            return found


def of_the_course():
    """The course's own.

    kind: library
    hint: that is the library
    """

    class LaterLinear(LaterLinear):
        @staticmethod
        def backward(ctx, gradient):
            from utils.parallel import zero_bubble

            (x,) = ctx.saved_tensors
            weight, bias = ctx.weight, ctx.bias
            ctx.waiting.append(lambda: zero_bubble._add(weight, bias, x.detach(), gradient))
            return gradient @ weight, None, None, None
