"""Given: what the check cell of exercise b looks at: what is there after B, and what after W."""

from pathlib import Path

import torch

from utils.course.checks import Wrong, on_ranks

SHAPES = {"rows": (5, 3), "sequences": (2, 4, 3)}


def halves(path: Path) -> str:
    """Judges `LaterLinear`."""
    for problem in on_ranks(1, path, trial)[0]:
        raise Wrong(problem)
    return (
        "B: the gradient of x, and nothing else; W: those of weight and bias, added up over\n"
        "two micro-batches, for rows and for sequences, with a bias and without."
    )


def trial(answer) -> list[str]:
    """On a rank: the first thing that is wrong, as a list of one sentence, or []."""
    for name, shape in SHAPES.items():
        for with_bias in (True, False):
            case = f"x {shape}, {'with' if with_bias else 'without'} a bias"
            problem = _one(answer, shape, with_bias)
            if problem:
                return [f"{name}, {case}: {problem}"]
    return []


def _one(answer, shape, with_bias) -> str:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2, bias=with_bias)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    for x in inputs:
        layer(x).square().sum().backward()
    right = {"x": [x.grad for x in inputs], **{n: p.grad for n, p in layer.named_parameters()}}
    layer.zero_grad()
    waiting = [[], []]  # one list for each micro-batch
    for x, later in zip(inputs, waiting):
        x.grad = None
        y = answer.LaterLinear.apply(x, layer.weight, layer.bias, later)
        y.square().sum().backward()
        if any(parameter.grad is not None for parameter in layer.parameters()):
            return "after B the weight has a gradient already: B should leave it for later."
        if x.grad is None:
            return "after B there is no gradient of x, for which the rank before waits."
    for x, expected in zip(inputs, right["x"]):
        if not torch.allclose(x.grad, expected, atol=1e-5):
            return f"the gradient of x is off by {_off(x.grad, expected)}."
    if not all(waiting):
        return "after B nothing waits: put a function into ctx.waiting."
    for later in waiting:
        for function in later:
            try:
                function()
            except RuntimeError as error:
                return f"W fails: {error}"
    for name, parameter in layer.named_parameters():
        if parameter.grad is None:
            return f"after W there is no gradient of the {name}."
        if parameter.grad.shape != parameter.shape:
            return f"the gradient of the {name} has the shape {tuple(parameter.grad.shape)}."
        if not torch.allclose(parameter.grad, right[name], atol=1e-5):
            return (
                f"after two micro-batches the gradient of the {name} is off by "
                f"{_off(parameter.grad, right[name])}: is it the sum of both?"
            )
    return ""


def _off(found, expected) -> str:
    return f"{(found - expected).abs().max().item():.2g}"
