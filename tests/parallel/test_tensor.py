"""Tensor parallelism: N ranks match one and send no more than needed."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from utils.measure.traffic import Traffic
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.models.tp_plan import TP_PLANS, planned
from utils.parallel import tp_ops
from utils.parallel.mesh import make_mesh, one_rank
from utils.parallel.tensor import (
    Split,
    gathered_logits,
    loss_function,
    reduce_replicated_gradients,
    split_by_plan,
    tensor_parallel,
    vocabulary_cross_entropy,
)
from utils.ranks import Ranks
from utils.shares import shares

PLAIN = GPTConfig(vocab_size=61, hidden_size=24, layers=2, heads=4)
# what tests/training/test_mixes.py does not cover: biases, heads and columns that divide unevenly
CONFIGS = {
    "grouped queries": GPTConfig(61, 24, 2, heads=6, kv_heads=3),
    "two key-value heads": GPTConfig(62, 24, 1, heads=6, kv_heads=2, attention_bias=True),
    "a group on two ranks": GPTConfig(61, 40, 1, heads=10, kv_heads=2),
    "biases": GPTConfig(64, 24, 1, heads=4, attention_bias=True, mlp_bias=True),
    "odd MLP": GPTConfig(vocab_size=63, hidden_size=16, layers=1, heads=4, intermediate_size=37),
}


@pytest.fixture(scope="module")
def pools():
    with Ranks(2, device="cpu") as two, Ranks(3, device="cpu") as three:
        yield {2: two, 3: three}


def new_model(config, seed=0):
    torch.manual_seed(seed)
    model = GPT(config).double()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # initial values that reveal mistakes
            parameter.data.normal_(1.0, 0.1)
    return model


def batch(config, rows=3, length=9):
    tokens = torch.randint(
        config.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(1)
    )
    return tokens[:, :-1], tokens[:, 1:]


def whole(parameter, tensor):
    split = getattr(parameter, "tp_split", None)
    return tensor if split is None else split.full_tensor(tensor)


def step(config, size=1, sequence_parallel=False):
    """Logits, loss and gradients of a step on `size` ranks, reassembled."""
    axis = make_mesh(tp=size).tp
    model = tensor_parallel(new_model(config), axis, sequence_parallel)
    x, y = batch(config, length=7)
    logits = model(x)
    loss = loss_function(model)(logits, y, "mean")
    loss.backward()
    reduce_replicated_gradients(model, axis)
    gradients = {name: whole(p, p.grad) for name, p in model.named_parameters()}
    return gathered_logits(logits.detach(), axis), loss.detach(), gradients


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_equal_to_one_rank(pools, name, sequence_parallel):
    logits, loss, gradients = step(CONFIGS[name])
    for found in pools[3].run(step, CONFIGS[name], 3, sequence_parallel):
        torch.testing.assert_close(found[0], logits, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found[1], loss, rtol=1e-10, atol=0)
        torch.testing.assert_close(found[2], gradients, rtol=1e-8, atol=1e-11)


# ---- what each rank holds


def held(config, sequence_parallel=False):
    axis = make_mesh(tp=dist.get_world_size()).tp
    names = [name for name, _ in new_model(config).named_parameters()]
    model = tensor_parallel(new_model(config), axis, sequence_parallel)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    return {
        name: (tuple(p.shape), getattr(p, "tp_split", None) and p.tp_split.sizes)
        for name, p in model.named_parameters()
    }


def test_every_rank_holds_its_part(pools):
    config = CONFIGS["grouped queries"]  # 6 heads, 3 key-value heads of 4 values; MLP 64
    first, second = pools[2].run(held, config)
    block = "model.layers.0."
    assert first["model.embed_tokens.weight"] == ((31, 24), (31, 30))
    assert second["lm_head.weight"] == ((30, 24), (31, 30))
    assert first[block + "self_attn.q_proj.weight"] == ((16, 24), (16, 8))
    assert second[block + "self_attn.k_proj.weight"] == ((4, 24), (8, 4))
    assert second[block + "self_attn.o_proj.weight"] == ((24, 8), (16, 8))
    assert first[block + "mlp.down_proj.weight"] == ((24, 32), (32, 32))
    assert first[block + "input_layernorm.weight"] == ((24,), None)
    total = sum(torch.Size(shape).numel() for one in (first, second) for shape, _ in one.values())
    norms = sum(torch.Size(shape).numel() for shape, sizes in first.values() if sizes is None)
    assert total - norms == config.parameter_count()


def test_few_key_value_heads_stay_whole(pools):
    for one in pools[3].run(held, CONFIGS["two key-value heads"]):
        assert one["model.layers.0.self_attn.k_proj.weight"] == ((8, 24), None)
        assert one["model.layers.0.self_attn.q_proj.weight"] == ((8, 24), (8, 8, 8))


def test_one_rank_is_left_alone():
    model = new_model(PLAIN)
    before = repr(model)
    assert repr(tensor_parallel(model, one_rank().tp, True)) == before
    assert loss_function(model) is cross_entropy
    logits = torch.randn(2, 3, 5)
    assert gathered_logits(logits, one_rank().tp) is logits


# ---- traffic


def counted(config):
    axis = make_mesh(tp=dist.get_world_size()).tp
    model = tensor_parallel(new_model(config), axis, sequence_parallel=True)
    x, y = batch(config, length=8)
    loss = loss_function(model)
    with Traffic() as forward:
        logits = model(x)
    with Traffic() as losses:
        value = loss(logits, y, "mean")
    with Traffic() as backward:
        value.backward()
    with Traffic() as afterwards:
        reduce_replicated_gradients(model, axis)
    return [
        {op: (t.calls(op), t.payload(op)) for op in ("all_reduce", "all_gather", "reduce_scatter")}
        for t in (forward, losses, backward, afterwards)
    ]


def test_a_split_sequence_sends_two_halves_of_two_all_reduces_a_layer_each_way(pools):
    x = 3 * 8 * 24 * 8
    for forward, losses, backward, afterwards in pools[2].run(counted, PLAIN):
        for part in (forward, backward):
            # 2 in each of 2 layers, and the embedding or lm_head
            assert part["all_gather"] == (5, 5 * x // 2)  # the payload is this rank's shard
            assert part["reduce_scatter"] == (5, 5 * x)
            assert part["all_reduce"] == (0, 0)
        assert losses["all_reduce"] == (2, 3 * 3 * 8 * 8)
        assert afterwards["all_reduce"] == (1, 5 * 24 * 8)  # the norms' weights, in one call


# ---- the loss over a split vocabulary


def losses_of(logits, targets, reduction, dtype, told):
    """The loss, the full gradient and the full logits."""
    axis = make_mesh(tp=dist.get_world_size()).tp
    sizes = shares(logits.shape[-1], axis.size)
    split = Split(2, axis, sizes)
    own = split.part(logits).to(dtype).clone().requires_grad_()
    loss = vocabulary_cross_entropy(own, targets, axis, reduction, sizes if told else None)
    loss.sum().backward()
    return loss.detach(), split.full_tensor(own.grad), gathered_logits(own, axis)


@pytest.mark.parametrize(
    ("reduction", "dtype", "told"),
    [
        ("mean", torch.float64, True),
        ("sum", torch.float32, False),
        ("none", torch.bfloat16, True),
        ("mean", torch.bfloat16, False),
    ],
)
def test_the_loss_is_torchs(pools, reduction, dtype, told):
    torch.manual_seed(0)
    logits = (30 * torch.randn(2, 5, 11)).to(dtype)
    logits[0, 0] += 200  # exp would overflow
    targets = torch.randint(11, (2, 5))
    targets[1, 2] = -100  # ignored
    reference = logits.clone().requires_grad_()
    expected = cross_entropy(reference, targets, reduction=reduction)
    expected.sum().backward()
    for loss, gradient, gathered in pools[3].run(
        losses_of, logits, targets, reduction, dtype, told
    ):
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(gradient, reference.grad)
        assert torch.equal(gathered, logits)


def test_an_unknown_reduction_is_named():
    with pytest.raises(ValueError, match="reduction 'avg' is not one of"):
        vocabulary_cross_entropy(torch.zeros(1, 1, 2), torch.zeros(1, 1), one_rank().tp, "avg")


# ---- in and out of a region


def conjugates():
    """(result, gradient) of f and of g; rank r's gradient of the result is r + 1 everywhere."""
    axis = make_mesh(tp=dist.get_world_size()).tp
    rank = axis.index
    found = []
    for into in (tp_ops.copy_to_region, tp_ops.reduce_from_region):
        x = torch.full((2,), float(10 + rank), requires_grad=True)
        y = into(x, axis)
        y.backward(torch.full((2,), float(1 + rank)))
        found.append((y.tolist(), x.grad.tolist()))
    return found


def test_f_and_g_are_each_others_mirror(pools):
    for rank, (f, g) in enumerate(pools[3].run(conjugates)):
        assert f == ([10.0 + rank] * 2, [6.0] * 2)
        assert g == ([33.0] * 2, [1.0 + rank] * 2)


def keeps_its_input():
    """The all-reduce of one branch must not change a gradient that another branch shares."""
    axis = make_mesh(tp=2).tp
    x = torch.ones(3, requires_grad=True)
    y = tp_ops.copy_to_region(x, axis)
    (y + x).sum().backward()
    return x.grad.tolist()


def test_a_shared_gradient_is_not_overwritten(pools):
    assert pools[2].run(keeps_its_input) == [[3.0] * 3] * 2


# ---- what cannot be split


def refused(config):
    try:
        tensor_parallel(GPT(config), make_mesh(tp=3).tp)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 2}, "tp 3 is more than the 2 attention heads: a head is not split, so take at "),
        ({"heads": 4, "intermediate_size": 2}, "tp 3 is more than the 2 columns of the MLP: "),
        ({"heads": 4, "vocab_size": 2}, "tp 3 is more than the 2 words of the vocabulary: "),
    ],
)
def test_too_many_ranks_are_refused(pools, sizes, message):
    config = GPTConfig(**{"vocab_size": 61, "hidden_size": 16, "layers": 1, **sizes})
    for found in pools[3].run(refused, config):
        assert found.startswith(message) and found.endswith("take at most 2 ranks")


# ---- any model, by a plan


class Conv1D(torch.nn.Module):
    """GPT-2's linear layer: the weight is (inputs, outputs)."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = torch.nn.Parameter(torch.randn(inputs, outputs))
        self.bias = torch.nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Packed(torch.nn.Module):
    """Attention as in GPT-2, which stores the width of q, k and v."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj, self.split_size = Conv1D(36, 12), Conv1D(12, 12), 12

    def forward(self, x):
        q, k, v = (p.unflatten(-1, (-1, 4)) for p in self.c_attn(x).split(self.split_size, dim=-1))
        y = F.scaled_dot_product_attention(*(p.transpose(1, 2) for p in (q, k, v)))
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Biased(torch.nn.Module):
    """Attention as in T5, with a column per head in a table."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(12, 12) for _ in range(4))
        self.table, self.n_heads = torch.nn.Embedding(5, 3), 3

    def forward(self, x):
        q, k, v = (p(x).view(*x.shape[:2], self.n_heads, 4) for p in (self.q, self.k, self.v))
        bias = self.table(torch.arange(x.shape[1])).T[None, :, None]
        y = F.scaled_dot_product_attention(*(p.transpose(1, 2) for p in (q, k, v)), bias)
        return self.o(y.transpose(1, 2).flatten(2))


class EveryKind(torch.nn.Module):
    """One module of each kind in a plan; lm_head's weight and bias are tied."""

    def __init__(self):
        super().__init__()
        self.words, self.lm_head = torch.nn.Embedding(11, 12), torch.nn.Linear(12, 11)
        self.lm_head.weight, self.bias = self.words.weight, self.lm_head.bias
        self.packed, self.biased = Packed(), Biased()
        self.up, self.down = torch.nn.Linear(12, 7), torch.nn.Linear(7, 12)

    def forward(self, tokens):
        x = self.words(tokens)
        x = x + self.packed(x)
        x = x + self.biased(x)
        logits = self.lm_head(x + self.down(self.up(x).tanh()))
        return F.cross_entropy(logits.view(-1, 11), tokens.flip(1).flatten())


PLAN = {
    "words": ("column", "words of the vocabulary"),
    "c_attn": ("packed column", "query heads"),
    "packed.c_proj": ("row", "query heads"),
    "q": ("column", "query heads"),
    "k": ("column", "key-value heads"),
    "v": ("column", "key-value heads"),
    "table": ("table", "query heads"),
    "o": ("row", "query heads"),
    "up": ("column", "columns of the MLP"),
    "down": ("row", "columns of the MLP"),
    "lm_head": ("column", "words of the vocabulary"),
}


def by_plan(plan, heads=3, strict=True):
    """Return whether the loss matches one rank's, and the parameters whose gradients do not."""
    torch.manual_seed(0)
    right, tokens = EveryKind().double(), torch.randint(11, (2, 5))
    expected = right(tokens)
    expected.backward()
    torch.manual_seed(0)
    model = EveryKind().double()
    try:
        split_by_plan(model, make_mesh(tp=dist.get_world_size()).tp, plan, heads, strict=strict)
    except ValueError as error:
        return str(error)
    loss = model(tokens)
    loss.backward()
    found = {name: whole_of(p) for name, p in model.named_parameters()}
    wrong = [n for n, p in right.named_parameters() if not torch.allclose(found[n], p.grad)]
    return torch.allclose(loss, expected), wrong


def whole_of(parameter):
    return whole(parameter, parameter.grad)


def test_any_model_can_be_split_by_a_plan(pools):
    for size, pool in pools.items():  # 3 heads, 7 columns and 11 words are uneven
        assert pool.run(by_plan, PLAN) == [(True, [])] * size
    found = pools[2].run(by_plan, {"query": PLAN["q"]})
    assert found == ["no module of EveryKind is in this plan"] * 2
    message = "tp 3 is more than the 2 heads of keys and values: a head is not split, so take at "
    assert all(found.startswith(message) for found in pools[3].run(by_plan, PLAN, heads=2))


def test_a_tied_weight_is_split_under_all_of_its_names(pools):
    """If one name is forgotten, its gradient is wrong although the loss is right."""
    forgetful = {name: how for name, how in PLAN.items() if name != "words"}
    found = pools[2].run(by_plan, forgetful)
    message = "words.weight is a weight that the plan splits only under another name: add 'words'"
    assert all(error.startswith(message) for error in found)
    assert pools[2].run(by_plan, forgetful, strict=False) == [(True, ["words.weight"])] * 2


def test_an_entry_is_the_longest_ending_of_a_name():
    plan = TP_PLANS["bert"]
    assert planned(plan, "bert.encoder.layer.0.attention.output.dense") == ("row", "query heads")
    assert planned(plan, "bert.encoder.layer.0.output.dense") == ("row", "columns of the MLP")
    assert planned(plan, "bert.pooler.dense") is None


# ---- random numbers


def drawn():
    axis = make_mesh(tp=dist.get_world_size()).tp
    torch.manual_seed(0)
    first = torch.rand(3).tolist()
    with tp_ops.different_numbers(axis):
        own = torch.rand(3).tolist()
    state = torch.get_rng_state()
    with tp_ops.different_numbers(axis):
        other = torch.rand(3).tolist()
    after = torch.rand(3).tolist()
    torch.set_rng_state(state)
    with tp_ops.different_numbers(axis):
        again = torch.rand(3).tolist()
    assert again == other != own
    return first, own, other, after


def test_random_numbers_are_equal_outside_and_differ_inside(pools):
    found = pools[3].run(drawn)
    first, own, other, after = zip(*found)
    assert len(set(map(tuple, first))) == 1 and len(set(map(tuple, after))) == 1
    assert len(set(map(tuple, own))) == 3 and len(set(map(tuple, other))) == 3
