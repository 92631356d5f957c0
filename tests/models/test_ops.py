"""The last matrix and the loss in one: PyTorch's loss and gradients, without storing all logits."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from utils.models import ops
from utils.models.config import GPTConfig
from utils.models.gpt import GPT, cross_entropy


class Largest(TorchDispatchMode):
    """Records the number of values in the largest tensor that is made."""

    values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if torch.is_tensor(tensor):
                self.values = max(self.values, tensor.numel())
        return out


def plain(hidden, weight, targets):
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def loss_and_gradients(loss, hidden, weight, targets, factor=0.37):
    inputs = [part.detach().requires_grad_() for part in (hidden, weight)]
    nats = loss(*inputs, targets)
    return nats, *torch.autograd.grad(nats * factor, inputs)


@pytest.mark.parametrize(
    ("shape", "size", "words"), [((2, 5), 3, 7), ((1, 1), 5, 2), ((3, 11), 4, 1), ((0, 4), 3, 5)]
)
@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_it_is_torchs_loss_at_odd_sizes(shape, size, words, dtype, near, monkeypatch):
    monkeypatch.setattr(ops, "LOGITS", 0)  # as many rows at a time as the weight has columns
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, size, generator=generator).to(dtype)
    weight = torch.randn(words, size, generator=generator).to(dtype)
    targets = torch.randint(words, shape, generator=generator)
    expected = loss_and_gradients(plain, hidden, weight, targets)
    found = loss_and_gradients(ops.linear_cross_entropy, hidden, weight, targets)
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one - other).norm() <= near * other.norm() + near * 1e-3
    with torch.no_grad():
        assert ops.linear_cross_entropy(hidden, weight, targets) == found[0]


def test_no_tensor_is_larger_than_the_weight_or_a_part_of_the_logits(monkeypatch):
    monkeypatch.setattr(ops, "LOGITS", 2000)
    hidden, weight = torch.randn(1, 300, 8), torch.randn(100, 8)
    targets = torch.randint(100, (1, 300))
    with Largest() as largest:
        loss_and_gradients(ops.linear_cross_entropy, hidden, weight, targets)
    assert largest.values == 300 * 8  # the hidden states themselves; the logits are 30,000
    with Largest() as largest:
        loss_and_gradients(plain, hidden, weight, targets)
    assert largest.values == 300 * 100


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_with_targets_gives_the_sum_of_its_losses(tied):
    torch.manual_seed(0)
    model = GPT(GPTConfig(hidden_size=24, layers=1, heads=4, vocab_size=37, tie_embeddings=tied))
    x, y = torch.randint(37, (2, 3, 9))
    cross_entropy(model(x), y, reduction="sum").backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x, y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x, y).dtype == torch.float32
