"""Faults planted in real ranks are found by step, layer and rank; correct runs have none."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.patience import patience
from utils.measure import divergence
from utils.measure.divergence import Watch, bits_of
from utils.models.gpt import GPT, GPTConfig
from utils.parallel.mesh import make_mesh, one_rank
from utils.parallel.tensor import loss_function, tensor_parallel
from utils.ranks import Ranks

ROWS = 6


@pytest.fixture(scope="module")
def three():
    with Ranks(3, device="cpu", timeout=patience(60)) as ranks:
        yield ranks


class Net(nn.Module):
    def __init__(self, dropout=0.0, batch_norm=False):
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(12) if batch_norm else nn.LayerNorm(12)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(12, 4)

    def forward(self, x):
        return self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))


def trained(model, rows=slice(None), fault=None, average=None, steps=3):
    """The watch's entries of three steps; calls `fault(step, model)` before each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    with Watch(model) as watch:
        for step in range(steps):
            x, y = (torch.randn(ROWS, n, generator=generator)[rows] for n in (8, 4))
            if fault:
                fault(step, watch.model)
            (model(x) - y).square().mean().backward()
            if average:
                average(watch.model)
            watch.step()
            optimizer.step(), optimizer.zero_grad()
    return watch.entries


def net(**options):
    torch.manual_seed(0)
    return Net(**options)


def own_rows():
    share = ROWS // dist.get_world_size()
    return slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)


def with_ddp(fault=None, broadcast_buffers=True, **options):
    model = DistributedDataParallel(net(**options), broadcast_buffers=broadcast_buffers)
    return trained(model, own_rows(), fault)


def test_a_sound_run_has_no_difference(three):
    ranks, one = three.run(with_ddp), trained(net())
    assert divergence.first_difference(one, ranks) is None
    assert divergence.first_between(ranks) is None
    assert divergence.first_nan(ranks) is None
    first_step = [(e.phase, e.name) for e in one if e.step == 0]
    assert first_step[6:11] == [
        ("forward", "first"),
        ("forward", "norm"),
        ("forward", "dropout"),
        ("forward", "last"),
        ("forward", ""),
    ]
    assert [name for phase, name in first_step if phase == "backward"][2:] == [
        "dropout",
        "norm",
        "first",
    ]


def weight_changes(step, model):
    if (step, dist.get_rank()) == (1, 2):
        model.last.weight.data[1, 3] += 1e-3


def test_a_weight_that_changes_on_one_rank(three):
    ranks = three.run(with_ddp, weight_changes)
    for found in (
        divergence.first_between(ranks),
        divergence.first_difference(trained(net()), ranks),
    ):
        assert (found.entry.step, found.entry.phase, found.entry.name) == (
            1,
            "weight",
            "last.weight",
        )
        assert found.rank == 2
        assert str(found).startswith("step 1, the weight last.weight, rank 2: ")


def wrong_layer(step, model):
    """From step 2 on, one rank's norm has a different epsilon; only all ranks together show it."""
    if step == 2 and dist.get_rank() == 1:
        model.norm.eps = 0.1


def test_a_layer_that_computes_something_else(three):
    ranks, one = three.run(with_ddp, wrong_layer), trained(net())
    found = divergence.first_difference(one, ranks)
    assert (found.entry.step, found.entry.phase, found.entry.name) == (2, "forward", "norm")
    assert found.rank is None and "all ranks together" in str(found)


def another_seed():
    torch.manual_seed(dist.get_rank())
    model = Net()
    return trained(model, own_rows())


def test_seeds_that_differ_at_the_start(three):
    found = divergence.first_between(three.run(another_seed))
    assert (found.entry.step, found.entry.phase, found.entry.name) == (0, "weight", "first.weight")


def dropped_out(same_seed):
    model = net(dropout=0.5)
    torch.manual_seed(5 if same_seed else dist.get_rank())
    return trained(model)  # all rows on each rank, as under tensor parallelism


def test_dropout_of_another_seed(three):
    assert divergence.first_between(three.run(dropped_out, True), same_rows=True) is None
    found = divergence.first_between(three.run(dropped_out, False), same_rows=True)
    assert (found.entry.step, found.entry.phase, found.entry.name) == (0, "forward", "dropout")


def averaged_by_hand(forgotten=()):
    def average(model):
        for name, parameter in model.named_parameters():
            if name not in forgotten:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    return trained(net(), own_rows(), average=average)


def test_a_gradient_that_is_not_averaged(three):
    one = trained(net())
    assert divergence.first_difference(one, three.run(averaged_by_hand)) is None
    ranks = three.run(averaged_by_hand, ("norm.bias",))
    for found in (divergence.first_between(ranks), divergence.first_difference(one, ranks)):
        assert (found.entry.step, found.entry.phase) == (0, "gradient")
        assert found.entry.name == "norm.bias"


def test_a_buffer_that_differs(three):
    ranks = three.run(with_ddp, None, False, batch_norm=True)  # without broadcast_buffers
    found = divergence.first_between(ranks)
    assert (found.entry.step, found.entry.phase) == (0, "buffer")
    assert found.entry.name == "norm.running_mean"


def spoilt(step, model):
    if (step, dist.get_rank()) == (1, 2):
        model.norm.register_forward_hook(
            lambda *_: _[2].index_fill(1, torch.tensor([3]), torch.nan)
        )


def test_the_first_nan(three):
    ranks = three.run(with_ddp, spoilt)
    found = divergence.first_nan(ranks)
    # the watch's hook on the norm runs before the fault's: the next module is the first to show it
    assert (found.entry.step, found.entry.phase, found.entry.name) == (1, "forward", "dropout")
    assert found.rank == 2 and found.entry.bad == 2
    assert str(found).endswith("rank 2: 2 of 24 values are NaN or inf")
    assert divergence.first_difference(trained(net()), ranks).entry.name == "dropout"


def flipped(bit):
    model = net(batch_norm=True)
    before = divergence.differing(model)
    if dist.get_rank() == 1 and bit is not None:
        model.first.weight.data.view(torch.int32).view(-1)[17] ^= 1 << bit
    return before, divergence.differing(model)


@pytest.mark.parametrize("bit", [0, 22, 30])
def test_a_flipped_bit(three, bit):
    assert three.run(flipped, bit) == [({}, {"first.weight": [1]})] * 3


# ── tensor parallelism ────────────────────────────────────────────────────────────────────────

CONFIG = GPTConfig(vocab_size=61, hidden_size=24, layers=2, heads=6, kv_heads=3)


def gpt(tp, fault=False):
    """The watch's entries of two steps of a GPT in fp64, split over `tp` ranks."""
    torch.manual_seed(0)
    model = GPT(CONFIG).double()
    mesh = make_mesh(tp=tp) if tp > 1 else one_rank()
    tensor_parallel(model, mesh.tp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = loss_function(model)
    tokens = torch.randint(61, (2, 10), generator=torch.Generator().manual_seed(1))
    if fault and dist.get_rank() == 1:
        model.model.layers[1].mlp.up_proj.weight.data[0] *= 2
    with Watch(model) as watch:
        for _ in range(2):
            loss(model(tokens[:, :-1]), tokens[:, 1:]).mean().backward()
            watch.step()
            optimizer.step(), optimizer.zero_grad()
    return watch.entries, divergence.differing(model) if tp > 1 else {}


def test_tensor_parallel(three):
    one = three.run(alone)[0]
    ranks, odd = zip(*three.run(gpt, 3))
    assert divergence.first_difference(one, ranks, rtol=1e-9) is None
    assert divergence.first_between(ranks, same_rows=True) is None
    assert odd == ({},) * 3
    compared = {entry.name for entry in one} - {""}
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"} <= compared
    ranks, _ = zip(*three.run(gpt, 3, True))
    found = divergence.first_difference(one, ranks)
    assert (found.entry.phase, found.rank) == ("weight", None)
    assert found.entry.name == "model.layers.1.mlp.up_proj.weight"
    found = divergence.first_difference([entry for entry in one if entry.phase != "weight"], ranks)
    assert (found.entry.phase, found.entry.name) == ("forward", "model.layers.1.mlp.up_proj")


def alone():
    return gpt(1)[0] if dist.get_rank() == 0 else None


# ── comparing values ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int8", "bool", "complex64"])
def test_bits_see_order_type_and_every_bit(dtype):
    tensor = (torch.arange(30).reshape(5, 6) % 7).to(getattr(torch, dtype))
    bits = bits_of(tensor)
    assert bits == bits_of(tensor.clone()) and -(2**63) <= bits < 2**63
    assert bits == bits_of(tensor.t().contiguous().t())
    assert bits != bits_of(tensor.flip(0)) != bits_of(tensor.flip(1))
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    if dtype != "bool":  # a bool has one bit
        for place in range(0, len(raw), 7):
            for bit in range(8):
                other = raw.clone()
                other[place] ^= 1 << bit
                assert bits_of(other.view(tensor.dtype)) != bits


def test_bits_of_a_tensor_longer_than_a_block(monkeypatch):
    tensor = torch.randn(1000)
    whole = bits_of(tensor)
    monkeypatch.setattr(divergence, "BLOCK", 64)
    assert bits_of(tensor) == whole
    assert bits_of(torch.tensor(0.0)) == bits_of(torch.zeros(3)) == 0 != bits_of(torch.tensor(-0.0))


def test_entries_go_through_a_file(tmp_path):
    entries = trained(net())
    divergence.save(entries, tmp_path / "rank0.jsonl")
    assert divergence.load(tmp_path / "rank0.jsonl") == entries
    (tmp_path / "other").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="holds no entries"):
        divergence.load(tmp_path / "other")


def test_other_bad_input_is_one_sentence():
    with pytest.raises(ValueError, match="phase 'weights' is not one of weight, forward"):
        Watch(nn.Linear(1, 1), phases=["weights"])
    with pytest.raises(ValueError, match="no rank's entries"):
        divergence.first_difference([], [])
