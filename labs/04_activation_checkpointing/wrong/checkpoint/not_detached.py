"""Recomputes on the inputs as they are: the inner backward pass goes on into the outer graph.

hint: Detach them, or the inner backward pass goes on into the outer graph
"""


class Checkpoint(Checkpoint):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        inputs = ctx.saved_tensors
        today = torch.get_rng_state()  # noqa: F821
        torch.set_rng_state(ctx.random_state)  # noqa: F821
        with torch.enable_grad():  # noqa: F821
            output = ctx.function(*inputs)
        torch.set_rng_state(today)  # noqa: F821
        for tensor in inputs:
            if tensor.requires_grad:
                tensor.retain_grad()
        torch.autograd.backward(output, gradient, retain_graph=True)  # noqa: F821
        return None, *[t.grad for t in inputs]
