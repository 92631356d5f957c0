"""Lab 02: the answers that its checks must accept and reject, and its pieces."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.paths import ROOT
from utils.workshop import labs

LAB = Lab(
    "02_gradient_accumulation",
    {
        "accumulate": ("check_accumulate", "accumulation", "accumulate.py"),
        "ddp": ("check_ddp", "ddp", "ddp_step.py"),
        "noise": ("check_noise", "norms", "noise.py"),
        "estimate": ("check_noise", "estimate", "noise.py"),
    },
    {"utils.course.trial.HANG": 10.0},  # two answers are judged at once
)

OTHERS = {
    "accumulate: divides the whole message, into new gradients": """
def reduce_once(model, losses, tokens):
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    parameters = list(model.parameters())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    dtype = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
    message = torch.cat([torch.tensor([tokens, losses], dtype=dtype),
                         parameters_to_vector(grads).to(dtype)])
    dist.all_reduce(message)
    message[1:] /= message[0].clone()
    vector_to_parameters(message[2:].to(grads[0].dtype), grads)
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad
    return float(message[1])
""",
    "accumulate: sums of losses kept as tensors, backwards": """
def accumulate(model, micro_batches):
    losses, tokens = torch.zeros((), dtype=torch.float64), 0
    for x, y in reversed(micro_batches):
        loss = loss_sum(model, x, y)
        loss.backward()
        losses += loss.detach()
        tokens += (y != -100).sum()
    return [losses, tokens]
""",
    "accumulate: nothing to do for padding, a NumPy number and a Fraction": """
def accumulate(model, micro_batches):
    import numpy as np
    from fractions import Fraction

    losses, tokens = np.float64(0), Fraction(0)
    for x, y in micro_batches:
        if not counted(y):
            continue
        loss = loss_sum(model, x, y)
        loss.backward()
        losses, tokens = losses + loss.item(), tokens + counted(y)
    return losses, tokens

def reduce_once(model, losses, tokens, solution=reduce_once):
    return solution(model, float(losses), int(tokens))
""",
    "accumulate: waits for an asynchronous all-reduce, the two sums first": """
def reduce_once(model, losses, tokens):
    parameters = list(model.parameters())
    dtype = torch.promote_types(parameters[0].dtype, torch.float32)
    count = sum(p.numel() for p in parameters)
    buffer = torch.empty(count + 2, dtype=dtype)
    pieces = buffer[2:].split([p.numel() for p in parameters])
    for p, piece in zip(parameters, pieces):
        piece.copy_(p.grad.flatten()) if p.grad is not None else piece.zero_()
    buffer[0], buffer[1] = losses, tokens
    dist.all_reduce(buffer, async_op=True).wait()
    for p, piece in zip(parameters, pieces):
        p.grad = (piece / buffer[1]).view_as(p).to(p.dtype)
    return buffer[0] / buffer[1]
""",
    "accumulate: alone, no message": """
def reduce_once(model, losses, tokens, solution=reduce_once):
    if dist.get_world_size() > 1:
        return solution(model, losses, tokens)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad / tokens
    return losses / tokens
""",
    "ddp: the flag before the forward pass": """
def train_step(model, micro_batches, optimizer, max_norm):
    tokens, size = tokens_of_all(micro_batches), dist.get_world_size()
    total = 0.0
    for i, (x, y) in enumerate(micro_batches):
        model.require_backward_grad_sync = i == len(micro_batches) - 1
        loss = loss_sum(model, x, y) * (size / tokens)
        loss.backward()
        total += loss.item() / size
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    total = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
""",
    "ddp: all but the last in one no_sync": """
def train_step(model, micro_batches, optimizer, max_norm):
    scale = dist.get_world_size() / tokens_of_all(micro_batches)
    losses = []

    def backward(x, y):
        loss = scale * loss_sum(model, x, y)
        loss.backward()
        losses.append(loss.detach())

    with model.no_sync():
        for x, y in micro_batches[:-1]:
            backward(x, y)
    backward(*micro_batches[-1])
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    mean = sum(losses) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean
""",
    "ddp: clips by hand": """
def train_step(model, micro_batches, optimizer, max_norm):
    tokens = tokens_of_all(micro_batches)
    total = backward(model, micro_batches, tokens)
    norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt().item()
    for p in model.parameters():
        if norm > max_norm:
            p.grad *= max_norm / norm
    optimizer.step()
    model.zero_grad()
    dist.all_reduce(total)
    return total / tokens
""",
    "ddp: sums the losses while the gradients travel": """
def train_step(model, micro_batches, optimizer, max_norm):
    tokens = torch.tensor([float(sum(counted(y) for _, y in micro_batches))], dtype=torch.float64)
    work = dist.all_reduce(tokens, async_op=True)
    work.wait()
    total = backward(model, tuple(micro_batches), int(tokens))
    work = dist.all_reduce(total, async_op=True)
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    work.wait()
    return (total / tokens).numpy()[0]
""",
    "noise: fp64 numbers are added up here, waits": """
def squared_norms(gradient):
    import numpy as np

    size = dist.get_world_size()
    message = torch.empty(len(gradient) + 1, dtype=gradient.dtype)
    message[0], message[1:] = gradient.double().square().sum(), gradient
    dist.all_reduce(message, async_op=True).wait()
    gradient.copy_(message[1:]).div_(size)
    return np.float64(message[0].item() / size), gradient.norm() ** 2
""",
    "noise: a list of two, the mean by AVG where it is alone": """
def squared_norms(gradient, solution=squared_norms):
    if dist.get_world_size() == 1:
        square = gradient.square().sum().item()
        return [square, square]
    return list(solution(gradient))
""",
    "noise: in the gradient's place, with one number more": """
LONGER = {}

def squared_norms(gradient):
    key = len(gradient), gradient.dtype
    if LONGER.get("key") != key:
        LONGER.update(key=key, message=torch.empty(len(gradient) + 1, dtype=gradient.dtype))
    message = LONGER["message"]
    torch.cat([gradient, torch.dot(gradient, gradient)[None]], out=message)
    message /= dist.get_world_size()
    dist.all_reduce(message)
    gradient[:] = message[:-1]
    return message[-1].item(), torch.dot(gradient, gradient).item()
""",
    "noise: the norm of the small batch first": """
def squared_norms(gradient):
    size = dist.get_world_size()
    message = torch.cat([(gradient @ gradient)[None], gradient]) / size
    dist.all_reduce(message)
    gradient[:] = message[1:]
    return float(message[0]), float(gradient @ gradient)
""",
    "estimate: the paper's two formulas": """
def signal_and_noise(small, big, small_rows, big_rows):
    signal = (big_rows * big - small_rows * small) / (big_rows - small_rows)
    return signal, (small - big) / (1 / small_rows - 1 / big_rows)
""",
    "estimate: a linear system": """
def signal_and_noise(small, big, small_rows, big_rows):
    import numpy as np

    return np.linalg.solve([[1, 1 / small_rows], [1, 1 / big_rows]], [small, big]).tolist()
""",
    "estimate: fractions": """
def signal_and_noise(small, big, small_rows, big_rows):
    from fractions import Fraction

    small, big = Fraction(small), Fraction(big)
    noise = (small - big) * small_rows * big_rows / (big_rows - small_rows)
    return small - noise / small_rows, noise
""",
    "estimate: averages the norms": """
def noise_scale(history, small_rows, big_rows):
    small, big = (sum(column) / len(history) for column in zip(*history))
    signal, noise = signal_and_noise(small, big, small_rows, big_rows)
    return noise / signal
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 85, (12, 6, 4)

    def task(self, exercise, tasks):
        return tasks[exercise == "estimate"]


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_micro_batches_are_as_long_as_asked():
    from labs.support.gradient_accumulation import tiny_model

    (x, y), (_, padding) = tiny_model.micro_batches(0, [[3, 7], [0]])
    assert x.shape == y.shape == (2, tiny_model.LENGTH)
    assert [int((row != tiny_model.IGNORE).sum()) for row in y] == [3, 7]
    assert tiny_model.counted(y) == 10 and tiny_model.counted(padding) == 0
    again = tiny_model.micro_batches(0, [[3, 7], [0]])
    assert again[0][0].equal(x) and again[0][1].equal(y)


def test_the_measurement_says_when_there_is_nothing_to_measure(tmp_path, capsys):
    from labs.support.gradient_accumulation import check_noise

    for given in LAB.solution.glob("*.py"):
        (tmp_path / given.name).write_text(labs.generated(given, ROOT))
    assert check_noise.measure(tmp_path / "noise.py", steps=3, size=1) is None
    assert "is not written" in capsys.readouterr().out
