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
    {"utils.course.checks.HANG": 10.0},  # two answers are judged at once
)

OTHERS = {
    "accumulate: divides before the all-reduce is copied back, into new gradients": """
def reduce_once(model, losses, tokens):
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    parameters = list(model.parameters())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    message = torch.cat([torch.tensor([tokens, losses], dtype=torch.float64),
                         parameters_to_vector(grads)])
    dist.all_reduce(message)
    message[1:] /= message[0]
    vector_to_parameters(message[2:], grads)
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad
    return float(message[1])
""",
    "accumulate: sums of losses kept as tensors": """
def accumulate(model, micro_batches):
    losses, tokens = torch.zeros((), dtype=torch.float64), 0
    for x, y in micro_batches:
        loss = loss_sum(model, x, y)
        loss.backward()
        losses += loss.detach()
        tokens += (y != -100).sum()
    return losses, tokens
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
    "estimate: averages the norms": """
def noise_scale(history, small_rows, big_rows):
    small, big = (sum(column) / len(history) for column in zip(*history))
    signal, noise = signal_and_noise(small, big, small_rows, big_rows)
    return noise / signal
""",
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 40

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
