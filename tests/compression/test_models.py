"""Compression of whole models, each compared with an independent computation."""

import copy

import pytest
import torch
from torch.nn import functional as F

from utils.compression import INT4, INT8, Scheme, prune, quantize
from utils.compression.calibrate import gptq, observe, smooth, static_scales
from utils.compression.distill import DistillConfig, distill, distillation_loss
from utils.compression.evaluate import cost, held_out
from utils.compression.matrices import (
    first_reader,
    matrices,
    quantized,
    rounded,
    rounded_inputs,
    size,
)
from utils.models.config import GPTConfig
from utils.models.gpt import GPT, cross_entropy
from utils.models.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=256, hidden_size=24, layers=3, heads=4, intermediate_size=20, max_positions=64
    )
    made = GPT(config).double()
    with torch.no_grad():
        for parameter in made.parameters():  # nothing keeps its initial value
            parameter += 0.2 * torch.randn_like(parameter)
    return made.eval()


@pytest.fixture
def rows():
    return torch.randint(0, 256, (6, 33), generator=torch.Generator().manual_seed(1))


# ---- 1. matrices


def test_matrices_are_those_of_the_blocks(model):
    found = matrices(model)
    assert len(found) == 3 * 7 and all(name.startswith("model.layers.") for name in found)
    assert first_reader("model.layers.2.self_attn.v_proj") == "model.layers.2.self_attn.q_proj"
    assert first_reader("model.layers.0.mlp.up_proj") == "model.layers.0.mlp.gate_proj"
    assert first_reader("model.layers.1.mlp.down_proj") == "model.layers.1.mlp.down_proj"
    numbers = sum(linear.weight.numel() for linear in found.values())
    assert size(model) == 2 * model.parameter_count()
    scales = sum(len(linear.weight) for linear in found.values())
    assert size(model, INT8) == 2 * (model.parameter_count() - numbers) + numbers + 4 * scales


def test_a_rounded_copy_leaves_the_model_alone(model, rows):
    before = copy.deepcopy(model.state_dict())
    changed = quantized(model, INT8)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    name = "model.layers.1.mlp.up_proj"
    expected = quantize(matrices(model)[name].weight.detach(), INT8).dequantize()
    assert torch.equal(matrices(changed)[name].weight, expected.double())
    assert torch.equal(changed.model.norm.weight, model.model.norm.weight)
    assert not torch.equal(changed(rows), model(rows))


def test_inputs_are_rounded_inside_only(model, rows):
    exact = model(rows)
    with rounded_inputs(model):
        inside = model(rows)
    assert not torch.equal(inside, exact) and torch.equal(model(rows), exact)
    calm = static_scales(observe(model, rows))
    with rounded_inputs(model, calm):
        static = model(rows)
    with rounded_inputs(model, {name: scale / 50 for name, scale in calm.items()}):
        cut = model(rows)
    wrong = [(one - exact).norm() for one in (static, cut)]
    assert wrong[1] > 10 * wrong[0]


# ---- 2. calibration


def test_what_goes_in_is_seen_whole_in_any_batches(model, rows):
    entering = []
    name = "model.layers.1.mlp.gate_proj"
    hook = matrices(model)[name].register_forward_pre_hook(lambda m, x: entering.append(x[0]))
    model(rows)
    hook.remove()
    x = entering[0].flatten(0, 1).float()
    for batch in (1, 4, 6):
        seen = observe(model, rows, batch)
        assert set(seen) == {first_reader(one) for one in matrices(model)}
        torch.testing.assert_close(seen[name].gram, x.T @ x, rtol=1e-4, atol=1e-4)
        assert torch.equal(seen[name].largest, x.abs().amax(dim=0))
    assert static_scales(seen)[name] == x.abs().max() / 127
    assert static_scales(seen, 100)[name] == seen[name].rows.abs().max() / 127
    assert static_scales(seen, 50)[name] < static_scales(seen, 99)[name]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_smoothed_model_is_the_same_function_with_calmer_inputs(model, rows, alpha):
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[5] *= 100
        model.model.layers[2].post_attention_layernorm.weight[3] = 0.0  # a dead channel
    seen = observe(model, rows)
    calm = smooth(model, seen, alpha)
    torch.testing.assert_close(calm(rows), model(rows), rtol=1e-9, atol=1e-9)
    name = "model.layers.1.self_attn.q_proj"
    before, after = (one[name].largest for one in (seen, observe(calm, rows)))
    if alpha:
        assert after.max() / after.median() < 0.3 * before.max() / before.median()


def test_gptq_without_correlations_rounds_to_the_nearest():
    w = torch.randn(5, 40)
    for scheme in (INT8, INT4, Scheme(3, symmetric=False)):
        ahead = gptq(w, 7.0 * torch.eye(40), scheme)
        nearest = quantize(w, scheme)
        assert (ahead.values != nearest.values).sum() <= 1  # a tie, at most
        torch.testing.assert_close(ahead.scale, nearest.scale)


@pytest.mark.parametrize(
    "scheme", [INT4, Scheme(3), Scheme(4, "group", 11, symmetric=False)], ids=str
)
def test_gptq_keeps_outputs_nearer_than_weights(scheme):
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(16, 40, generator=generator)
    x = torch.randn(400, 10, generator=generator) @ torch.randn(10, 40, generator=generator)
    nearest, ahead = quantize(w, scheme), gptq(w, x.T @ x, scheme)
    assert ahead.nbytes == nearest.nbytes
    outputs = [F.linear(x, q.dequantize() - w).norm() for q in (nearest, ahead)]
    assert outputs[1] < 0.6 * outputs[0]
    weights = [(q.dequantize() - w).norm() for q in (nearest, ahead)]
    assert weights[1] > weights[0]


# ---- 3. pruning


def test_masks_have_as_many_as_asked_for():
    scores = torch.rand(6, 20)
    mask = prune.largest(scores, 0.3)
    assert mask.sum() == 36 and scores[mask].min() >= scores[~mask].max()
    mask = prune.two_of_four(scores)
    assert (mask.view(6, 5, 4).sum(dim=2) == 2).all()
    with pytest.raises(ValueError, match="18 columns cannot be divided into groups"):
        prune.two_of_four(scores[:, :18])


def test_without_heads_is_the_model_with_them_masked(model, rows):
    keep = [(0, 3), (1, 2), (2, 0)]
    smaller = prune.without_heads(model, keep)
    assert smaller.config.heads == 2 and smaller.config.head_size == 6
    masked = copy.deepcopy(model)
    with torch.no_grad():
        for block, heads in zip(masked.model.layers, keep):
            for head in {0, 1, 2, 3} - set(heads):
                block.self_attn.o_proj.weight[:, 6 * head : 6 * head + 6] = 0.0
    torch.testing.assert_close(smaller(rows), masked(rows), rtol=1e-9, atol=1e-9)
    gone = 3 * 2 * 4 * 6 * 24  # layers, heads, matrices, channels, hidden
    assert smaller.parameter_count() == model.parameter_count() - gone
    with pytest.raises(ValueError, match=r"layers keep \[1, 2, 2\] heads"):
        prune.without_heads(model, [(0,), (0, 1), (0, 1)])


def test_without_columns_and_layers(model, rows, tmp_path):
    keep = [torch.randperm(20)[:13] for _ in range(3)]
    smaller = prune.without_columns(model, keep)
    masked = rounded(model, lambda name, w: w)
    with torch.no_grad():
        for block, columns in zip(masked.model.layers, keep):
            gone = torch.ones(20, dtype=torch.bool)
            gone[columns] = False
            block.mlp.down_proj.weight[:, gone] = 0.0
    torch.testing.assert_close(smaller(rows), masked(rows), rtol=1e-9, atol=1e-9)

    shorter = prune.without_layers(model, [1])
    by_hand = copy.deepcopy(model)
    by_hand.model.layers[1] = torch.nn.Identity()
    by_hand.model.layers[1].forward = lambda x, *rest: x
    torch.testing.assert_close(shorter(rows), by_hand(rows))
    assert shorter.config.layers == 2
    shorter.save_pretrained(tmp_path / "shorter")
    torch.testing.assert_close(GPT.from_pretrained(tmp_path / "shorter")(rows), shorter(rows))
    for numbers in ([3], [0, 1, 2]):
        with pytest.raises(ValueError, match=r"cannot remove layers .* from 3"):
            prune.without_layers(model, numbers)


def test_importance_finds_what_does_nothing(model, rows):
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 12:18] = 0.0  # head 2
        model.model.layers[2].mlp.down_proj.weight[:, 7] = 0.0
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    heads = prune.head_importance(model, rows)
    assert heads.shape == (3, 4) and heads[1, 2] == 0 and (heads[1, [0, 1, 3]] > 0).all()
    columns = prune.column_importance(model, rows)
    assert columns.shape == (3, 20) and columns[2, 7] == 0 and (columns[2] > 0).sum() == 19
    losses = prune.layer_importance(model, rows)
    whole = cross_entropy(model(rows[:, :-1]), rows[:, 1:]).item()
    assert losses[0] == pytest.approx(whole, abs=1e-6) and losses[1] != pytest.approx(whole)


def test_importance_is_the_derivative_by_a_factor(model, rows):
    row, step = rows[:1], 1e-5

    def loss(factor):
        scaled = copy.deepcopy(model)
        with torch.no_grad():
            scaled.model.layers[1].self_attn.o_proj.weight[:, 6:12] *= factor
        return cross_entropy(scaled(row[:, :-1]), row[:, 1:]).item()

    slope = abs(loss(1 + step) - loss(1 - step)) / (2 * step)
    assert prune.head_importance(model, row)[1, 1].item() == pytest.approx(slope, rel=1e-4)


# ---- 4. distillation


def test_the_loss_is_the_divergence():
    teacher, student = torch.randn(2, 2, 5, 11, dtype=torch.float64)
    p, q = (one.softmax(dim=-1) for one in (teacher, student))
    by_hand = (p * (p / q).log()).sum(dim=-1).mean()
    torch.testing.assert_close(distillation_loss(student, teacher), by_hand)
    assert distillation_loss(teacher, teacher).abs() < 1e-6
    hot = distillation_loss(student, teacher, temperature=50.0)
    gap = (student - teacher) - (student - teacher).mean(dim=-1, keepdim=True)
    # for large T, half the mean squared difference of the logits (Hinton et al., section 2.1)
    torch.testing.assert_close(hot, 0.5 * gap.square().mean(), rtol=0.1, atol=0)


def test_a_student_comes_nearer_to_its_teacher(model):
    teacher, student = model.float(), prune.without_layers(model, [1]).float()
    before = copy.deepcopy(student.state_dict())
    tokens = torch.randint(0, 256, (2000,))
    config = DistillConfig(steps=12, batch=4, seq=16, optimizer="adamw", lr=3e-3)
    taught = distill(student, teacher, tokens, config)
    again = distill(student, teacher, tokens, config)
    assert all(torch.equal(a, b) for a, b in zip(taught.parameters(), again.parameters()))
    assert all(torch.equal(before[name], now) for name, now in student.state_dict().items())
    assert all(p.grad is None for p in teacher.parameters())
    x = tokens[:60][None]
    near, far = (distillation_loss(one(x), teacher(x)).item() for one in (taught, student))
    assert near < 0.9 * far
    alone = distill(student, None, tokens, config)
    assert distillation_loss(alone(x), teacher(x)).item() > near


# ---- 5. the measure


def test_every_token_counts_once(model):
    model, tokens = model.float(), torch.randint(0, 256, (50,))
    one = held_out(model, Tokenizer(), tokens, window=64)
    row = torch.cat((torch.zeros(1, dtype=torch.long), tokens))[None]
    nats = cross_entropy(model(row[:, :-1]), row[:, 1:], reduction="sum").item()
    assert one.tokens == 50 and one.bytes.sum() == 50
    assert one.bits_per_byte == pytest.approx(nats / 0.693147 / 50, rel=1e-5)
    several = held_out(model, Tokenizer(), tokens, window=16, stride=12, batch=2)
    assert several.bytes.sum() == 50 and len(several.bits) > 2
    low, high = several.interval
    assert low < several.bits_per_byte < high
    assert cost(several, several).mean == 0
    other = held_out(quantized(model, INT8), Tokenizer(), tokens, window=16, stride=12)
    found = cost(other, several)
    assert found.low <= found.mean <= found.high
    assert found.high - found.low < other.interval[1] - other.interval[0]
