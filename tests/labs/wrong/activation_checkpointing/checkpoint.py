"""Lab 04, checkpoint: each body, written after the solution, is a wrong answer."""


def all_inputs():
    """Asks every input for a gradient, the mask as well.

    kind: odd
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

    kind: library
    hint: that is the library
    """

    def checkpoint(function, *inputs):
        return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)


def gradients_off():
    """Recomputes without history.

    kind: values
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

    kind: inputs
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

    kind: memory
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

    kind: work
    hint: in the backward pass the layers ran [0
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

    kind: work
    hint: in the backward pass the layers ran [0
    """

    def checkpoint(function, *inputs):
        return function(*inputs)


def no_gradient_for_inputs():
    """Returns no gradients for the inputs.

    kind: part
    hint: return one gradient for each input
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            gradients = super(Checkpoint, Checkpoint).backward(ctx, gradient)
            return (None,) * len(gradients)


def not_detached():
    """Recomputes on the inputs as they are: the inner backward pass goes on into the outer graph.

    kind: values
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

    kind: step
    hint: draw the random numbers that the forward pass has drawn
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

    kind: part
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

    kind: step
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

    kind: work
    hint: in the backward pass the layers ran [2
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            ctx.function(*ctx.saved_tensors)
            return super(Checkpoint, Checkpoint).backward(ctx, gradient)


def saves_the_output():
    """Saves the inside as well: here everything that the layer's parts return.

    kind: memory
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

    kind: values
    hint: Does `backward` start from the gradient that it is given?
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            return super(Checkpoint, Checkpoint).backward(ctx, torch.ones_like(gradient))


def library_by_another_name():
    """Puts the library's name together.

    kind: library
    hint: uses torch.utils.checkpoint: that is the library
    """

    def checkpoint(function, *inputs):
        import importlib

        library = importlib.import_module("torch.utils." + "check" + "point")
        return getattr(library, "check" + "point")(function, *inputs, use_reentrant=True)


def autocast_forgotten():
    """Recomputes in the type of today.

    kind: types
    hint: forward under autocast to torch
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            ctx.autocast = torch.bfloat16, False
            return super(Checkpoint, Checkpoint).backward(ctx, gradient)


def saved_in_bf16():
    """Keeps inputs with fewer bits.

    kind: types
    hint: the gradient of
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def forward(ctx, function, *inputs):
            output = super(Checkpoint, Checkpoint).forward(ctx, function, *inputs)
            flags = [t.requires_grad for t in inputs]
            small = [t.bfloat16() if t.is_floating_point() else t for t in inputs]
            ctx.save_for_backward(*small)
            ctx.kinds, ctx.flags = [t.dtype for t in inputs], flags
            return output

        @staticmethod
        def backward(ctx, gradient):
            inputs = [
                t.to(kind).detach().requires_grad_(flag)
                for t, kind, flag in zip(ctx.saved_tensors, ctx.kinds, ctx.flags)
            ]
            today = torch.get_rng_state()
            torch.set_rng_state(ctx.random_state)
            with torch.enable_grad():
                output = ctx.function(*inputs)
            torch.set_rng_state(today)
            torch.autograd.backward(output, gradient)
            return None, *[t.grad for t in inputs]


def state_of_the_first_call():
    """Notes the random state once, in the module.

    kind: constants
    hint: draw the random numbers that the forward pass has drawn
    """

    state = []

    class Checkpoint(Checkpoint):
        @staticmethod
        def forward(ctx, function, *inputs):
            output = super(Checkpoint, Checkpoint).forward(ctx, function, *inputs)
            state.append(ctx.random_state)
            ctx.random_state = state[0]
            return output


def states_on_a_stack():
    """Takes the latest random state, as if backward passes came as from a stack.

    kind: step
    hint: draw the random numbers that the forward pass has drawn
    """

    states = []

    class Checkpoint(Checkpoint):
        @staticmethod
        def forward(ctx, function, *inputs):
            output = super(Checkpoint, Checkpoint).forward(ctx, function, *inputs)
            states.append(ctx.random_state)
            return output

        @staticmethod
        def backward(ctx, gradient):
            ctx.random_state = states.pop()
            return super(Checkpoint, Checkpoint).backward(ctx, gradient)


def keeps_inputs_for_ever():
    """A list of the module holds every input.

    kind: memory
    hint: bytes are still held after the backward pass
    """

    every = []

    class Checkpoint(Checkpoint):
        @staticmethod
        def forward(ctx, function, *inputs):
            every.extend(inputs)
            return super(Checkpoint, Checkpoint).forward(ctx, function, *inputs)


def empties_its_gradient():
    """Uses the gradient's memory for something else.

    kind: inputs
    hint: gradient is not what it was before the call
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            found = super(Checkpoint, Checkpoint).backward(ctx, gradient)
            gradient.data.zero_()
            return found


def first_input_only():
    """Gives a gradient to the first input and to no other.

    kind: part
    hint: got no gradient
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            found = super(Checkpoint, Checkpoint).backward(ctx, gradient)
            return (*found[:2], *[None for _ in found[2:]])


def rows_only():
    """Flattens what comes in.

    kind: sizes
    hint: but expected shape compatible with | and (
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def forward(ctx, function, *inputs):
            inputs = [t.flatten(0, -2) if t.dim() > 1 else t for t in inputs]
            return super(Checkpoint, Checkpoint).forward(ctx, function, *inputs)


def nothing_for_zeros():
    """Skips the recomputation where the gradient is zero.

    kind: odd
    hint: got no gradient
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            if not gradient.any():
                return None, *[None for _ in ctx.saved_tensors]
            return super(Checkpoint, Checkpoint).backward(ctx, gradient)


def one_input_twice():
    """An input that is given twice is one leaf, whose whole gradient is returned for both.

    kind: values
    hint: the gradient of x | the gradient of first | the gradient of
    """

    class Checkpoint(Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            leaves = {id(t): t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors}
            inputs = [leaves[id(t)] for t in ctx.saved_tensors]
            today = torch.get_rng_state()
            torch.set_rng_state(ctx.random_state)
            dtype, enabled = ctx.autocast
            with torch.enable_grad(), torch.autocast("cpu", dtype, enabled):
                output = ctx.function(*inputs)
            torch.set_rng_state(today)
            torch.autograd.backward(output, gradient)
            return None, *[t.grad for t in inputs]
