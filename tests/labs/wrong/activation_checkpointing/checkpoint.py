"""Lab 04, checkpoint: each body, written after the solution, is a wrong answer."""


def all_inputs():
    """Asks every input for a gradient, the mask as well.

    hint: only Tensors of floating point
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            today = torch.get_rng_state()
            torch.set_rng_state(ctx.random_state)
            with torch.enable_grad():
                output = ctx.function(*inputs)
            torch.set_rng_state(today)
            torch.autograd.backward(output, gradient)
            return None, *[t.grad for t in inputs]


def calls_the_library():
    """Lets PyTorch do it.

    hint: which is what you are building
    """

    def checkpoint(function, *inputs):
        return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)


def gradients_off():
    """Recomputes without history.

    hint: Run the function under torch.enable_grad()
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
            output = ctx.function(*inputs)
            torch.autograd.backward(output, gradient)
            return None, *[t.grad for t in inputs]


def inputs_on_ctx():
    """Keeps the inputs as an attribute: changes in place go unnoticed.

    hint: Keep tensors with ctx.save_for_backward(…), which checks
    """

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, *inputs):
            ctx.function, ctx.inputs = function, inputs
            ctx.random_state = torch.get_rng_state()
            return function(*inputs)

        @staticmethod
        def backward(ctx, gradient):
            inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.inputs]
            today = torch.get_rng_state()
            torch.set_rng_state(ctx.random_state)
            with torch.enable_grad():
                output = ctx.function(*inputs)
            torch.set_rng_state(today)
            torch.autograd.backward(output, gradient)
            return None, *[t.grad for t in inputs]


def keeps_the_graph():
    """Runs the function with gradients on, in the forward pass already.

    hint: Is the function run with gradients on
    """

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, *inputs):
            ctx.save_for_backward(*inputs)
            ctx.inputs = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
            ctx.function, ctx.state = function, torch.get_rng_state()
            with torch.enable_grad():
                ctx.output = function(*ctx.inputs)
            return ctx.output.detach()

        @staticmethod
        def backward(ctx, gradient):
            today = torch.get_rng_state()
            torch.set_rng_state(ctx.state)
            ctx.function(*ctx.saved_tensors)
            torch.set_rng_state(today)
            torch.autograd.backward(ctx.output, gradient)
            return None, *[t.grad for t in ctx.inputs]


def never_recomputes():
    """Keeps the whole graph of the forward pass and goes backward through that.

    hint: in the backward pass the layers ran [0, 0, 0, 0, 0] times
    """

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, *inputs):
            ctx.inputs = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
            with torch.enable_grad():
                ctx.output = function(*ctx.inputs)
            return ctx.output.detach()

        @staticmethod
        def backward(ctx, gradient):
            torch.autograd.backward(ctx.output, gradient)
            return None, *[t.grad for t in ctx.inputs]


def no_checkpoint():
    """Just calls the function.

    hint: in the backward pass the layers ran [0, 0, 0, 0, 0] times
    """

    def checkpoint(function, *inputs):
        return function(*inputs)


def no_gradient_for_inputs():
    """Returns no gradients for the inputs.

    hint: return one gradient for each input
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            gradients = super(Checkpoint, Checkpoint).backward(ctx, gradient)
            return (None,) * len(gradients)


def not_detached():
    """Recomputes on the inputs as they are: the inner backward pass goes on into the outer graph.

    hint: Detach them, or the inner backward pass goes on into the outer graph
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            inputs = ctx.saved_tensors
            today = torch.get_rng_state()
            torch.set_rng_state(ctx.random_state)
            with torch.enable_grad():
                output = ctx.function(*inputs)
            torch.set_rng_state(today)
            for tensor in inputs:
                if tensor.requires_grad:
                    tensor.retain_grad()
            torch.autograd.backward(output, gradient, retain_graph=True)
            return None, *[t.grad for t in inputs]


def other_random_numbers():
    """Does not restore the random state.

    hint: draws other random numbers
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
            today = torch.get_rng_state()
            with torch.enable_grad():
                output = ctx.function(*inputs)
            torch.set_rng_state(today)
            torch.autograd.backward(output, gradient)
            return None, *[t.grad for t in inputs]


def parameters_forgotten():
    """Asks for the gradients of the inputs only.

    hint: torch.autograd.grad only what you name
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
            with torch.enable_grad():
                output = ctx.function(*inputs)
            wanted = [t for t in inputs if t.requires_grad]
            found = iter(torch.autograd.grad(output, wanted, gradient))
            return None, *[next(found) if t.requires_grad else None for t in inputs]


def random_state_not_put_back():
    """Restores the old random state and leaves it there.

    hint: Put today's state back
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
            torch.set_rng_state(ctx.random_state)
            with torch.enable_grad():
                output = ctx.function(*inputs)
            torch.autograd.backward(output, gradient)
            return None, *[t.grad for t in inputs]


def runs_three_times():
    """Recomputes once for each thing that it needs.

    hint: in the backward pass the layers ran [2, 2, 2, 2, 2] times, and once is enough
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            ctx.function(*ctx.saved_tensors)
            return super(Checkpoint, Checkpoint).backward(ctx, gradient)


def saves_the_output():
    """Saves the inside as well: here everything that the layer's parts return.

    hint: or is more saved than its inputs
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def forward(ctx, function, *inputs):
            output = super(Checkpoint, Checkpoint).forward(ctx, function, *inputs)
            ctx.output = output * 1
            return output

        @staticmethod
        def backward(ctx, gradient):
            return super(Checkpoint, Checkpoint).backward(ctx, gradient + 0 * ctx.output)


def starts_from_ones():
    """Ignores the gradient that arrives.

    hint: Does `backward` start from the gradient that it is given?
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            return super(Checkpoint, Checkpoint).backward(ctx, torch.ones_like(gradient))
