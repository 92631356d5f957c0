"""Given: what the check cell of exercise 04a looks at.

A chain of layers with dropout runs once as it is and once through your `checkpoint`, from the same
random numbers: gradients, the number of runs, what is kept, and the random numbers that follow.
"""

import contextlib
from pathlib import Path

import torch
import torch.utils.checkpoint
from torch import nn

from utils.course.checks import Wrong, load_answer
from utils.measure.memory import Memory

ROWS, WIDTH, LAYERS = 32, 24, 5


def checkpointing(path: Path) -> str:
    """Judges `checkpoint` in the file."""
    with torch.random.fork_rng(devices=[]), _library_locked():
        answer = load_answer(path)
        _right_values(answer)
        _random_numbers(answer)
        _several_inputs(answer)
        _right_memory(answer)
        _changes_noticed(answer)
    return (
        "gradients of inputs and parameters equal those without it, dropout included;\n"
        f"after the forward pass {LAYERS} layers hold their {LAYERS} inputs and nothing else;\n"
        "each layer runs once more, in the backward pass; changes in place are noticed."
    )


class Chain(nn.Module):
    """First a plain layer, then LAYERS layers that `wrap` may make checkpoints of."""

    def __init__(self, dropout: float):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh(), nn.Dropout(dropout))
            for _ in range(LAYERS)
        )
        self.double()
        self.runs = [0] * LAYERS
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._count(index))

    def _count(self, index: int) -> None:
        self.runs[index] += 1

    def forward(self, x, wrap):
        x = self.first(x)
        for layer in self.layers:
            x = wrap(layer, x)
        return x


def _plain(function, *inputs):
    return function(*inputs)


def _pass(wrap, dropout=0.0) -> dict:
    """One forward and backward pass: gradients, and what happened on the way."""
    chain = Chain(dropout)
    x = torch.linspace(-1, 1, ROWS * WIDTH).double().view(ROWS, WIDTH).requires_grad_()
    torch.manual_seed(1)
    y = chain(x, wrap)
    if not isinstance(y, torch.Tensor) or not y.requires_grad:
        raise Wrong("the output has no history: does `checkpoint` return Checkpoint.apply(…)?")
    forward_runs, after_forward = list(chain.runs), torch.get_rng_state()
    try:
        (y.square().sum() / 7).backward()
    except RuntimeError as error:
        if "does not require grad" in str(error):
            raise Wrong(
                "the recomputed output has no history: inside `backward` gradients are off.\n"
                "Run the function under torch.enable_grad()."
            ) from None
        raise
    return {
        "gradients": {name: p.grad for name, p in chain.named_parameters()},
        "input": x.grad,
        "forward_runs": forward_runs,
        "runs": list(chain.runs),
        "after_forward": after_forward,
        "after_backward": torch.get_rng_state(),
    }


def _right_values(answer) -> None:
    expected, result = _pass(_plain), _pass(answer.checkpoint)
    if result["input"] is None:
        raise Wrong("the first input got no gradient: return one gradient for each input.")
    got, right = result["gradients"], expected["gradients"]
    missing = [name for name, gradient in got.items() if gradient is None]
    if missing:
        raise Wrong(
            f"{', '.join(missing[:3])} … got no gradient: torch.autograd.backward(output, gradient)"
            " reaches the parameters too, torch.autograd.grad only what you name."
        )
    wrong = [name for name in right if not torch.allclose(got[name], right[name], rtol=1e-9)]
    if wrong and not any(name.startswith(f"layers.{LAYERS - 1}.") for name in wrong):
        raise Wrong(
            "the last layer's gradients are right, those before it are not: the recomputation\n"
            "must end at its inputs. Detach them, or the inner backward pass goes on into the "
            "outer graph."
        )
    if wrong:
        raise Wrong(
            f"the gradients of {', '.join(wrong[:3])} … differ from those without checkpoints.\n"
            "Does `backward` start from the gradient that it is given?"
        )
    if result["forward_runs"] != [1] * LAYERS:
        raise Wrong(f"in the forward pass the layers ran {result['forward_runs']} times, not once.")
    if result["runs"] != [2] * LAYERS:
        again = [runs - 1 for runs in result["runs"]]
        raise Wrong(f"in the backward pass the layers ran {again} times, and once is enough.")


def _random_numbers(answer) -> None:
    expected, result = _pass(_plain, dropout=0.5), _pass(answer.checkpoint, dropout=0.5)
    if not torch.equal(result["after_forward"], expected["after_forward"]):
        raise Wrong("the forward pass leaves another random state than without checkpoints.")
    pairs = zip(result["gradients"].values(), expected["gradients"].values())
    if not all(torch.allclose(a, b, rtol=1e-9) for a, b in pairs):
        raise Wrong(
            "with dropout the gradients differ, and without they are right: the recomputation\n"
            "draws other random numbers. Restore the state that the forward pass began with."
        )
    if not torch.equal(result["after_backward"], expected["after_backward"]):
        raise Wrong(
            "after the backward pass the random state is not what it was before it: everything\n"
            "drawn later repeats old numbers. Put today's state back after the recomputation."
        )


def _several_inputs(answer) -> None:
    x, y = (torch.ones(3, dtype=torch.double, requires_grad=True) for _ in range(2))
    mask = torch.tensor([True, False, True])
    answer.checkpoint(lambda a, m, b: (a * m).exp() * b * b, x, mask, y).sum().backward()
    right = torch.tensor([torch.e, 0, torch.e], dtype=torch.double)
    if x.grad is None or y.grad is None or not torch.allclose(x.grad, right):
        raise Wrong("with inputs (x, mask, y), the gradient of x or y is missing or wrong.")
    if not torch.allclose(y.grad, 2 * torch.tensor([torch.e, 1, torch.e], dtype=torch.double)):
        raise Wrong("with inputs (x, mask, y), y gets a gradient that is not its own.")


def _right_memory(answer) -> None:
    chain = Chain(0.0)
    x = torch.ones(ROWS, WIDTH, dtype=torch.double)
    with Memory(model=chain) as memory:
        with memory.phase("forward"):
            loss = chain(x, answer.checkpoint).sum()
        kept = memory.now()["activations"] - loss.nbytes
        with memory.phase("backward"):
            loss.backward()
        most = max(held["activations"] for _, held in memory.timeline)
    inputs = (LAYERS + 1) * x.nbytes  # and the input of the plain layer before them
    if kept > inputs + x.nbytes / 2:
        raise Wrong(
            f"after the forward pass {kept:,} bytes are kept; the inputs have {inputs:,}.\n"
            "Is the function run with gradients on, or is more saved than its inputs?"
        )
    inside = 3 * x.nbytes  # of one layer: two outputs of tanh, and dropout's input
    if most > inputs + 2 * inside:
        raise Wrong(f"in the backward pass {most:,} bytes are kept: more than one layer at once.")


def _changes_noticed(answer) -> None:
    x = torch.ones(4, dtype=torch.double, requires_grad=True) * 1
    y = answer.checkpoint(torch.exp, x)
    x.mul_(2)
    with contextlib.suppress(RuntimeError):
        y.sum().backward()
        raise Wrong(
            "an input was changed in place before the backward pass, and nobody noticed: the\n"
            "gradient is silently wrong. Keep tensors with ctx.save_for_backward(…), which checks."
        )


@contextlib.contextmanager
def _library_locked():
    """torch's own checkpoint raises meanwhile."""

    def locked(*_, **__):
        raise Wrong("this calls torch.utils.checkpoint, which is what you are building.")

    module, names = torch.utils.checkpoint, ("checkpoint", "checkpoint_sequential")
    before = {name: getattr(module, name) for name in names}
    before_apply = module.CheckpointFunction.apply
    for name in names:
        setattr(module, name, locked)
    module.CheckpointFunction.apply = locked
    try:
        yield
    finally:
        module.CheckpointFunction.apply = before_apply
        for name, function in before.items():
            setattr(module, name, function)
