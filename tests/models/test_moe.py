"""The mixture of experts on one rank, against a loop over tokens and transformers."""

import copy
import math
import os

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models import small_models
from utils.memory.checkpointing import recompute
from utils.memory.precision import autocast
from utils.models import moe
from utils.models.gpt import GPT, GPTConfig, cross_entropy, keep_from_compiling

pytestmark = pytest.mark.usefixtures("one_thread")

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # silences deepspeed inside transformers


def small(**changes):
    sizes = {"intermediate_size": 31, "experts": 5, "experts_per_token": 2}
    return small_models.small(**{**sizes, **changes})


def random_model(config, seed=0):
    return small_models.random_model(config, seed, torch.float64)


def layer_of(seed=0, **changes):
    return moe.moe_layers(random_model(small(**changes), seed))[0]


def tokens_of(batch=3, length=9, seed=1):
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_all_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], msg=lambda m, n=name: f"{n}: {m}")


# ---- the layer


def one_token_at_a_time(layer, x):
    """A mixture of experts by its definition."""
    rows = []
    for token in x.flatten(0, 1):
        probabilities = (layer.gate.weight @ token).softmax(dim=0)
        likeliest = sorted(range(layer.count), key=lambda e: -probabilities[e])
        used = likeliest[: layer.chosen_per_token]
        total = sum(probabilities[e] for e in used)
        rows.append(sum(probabilities[e] / total * layer.experts[str(e)](token) for e in used))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(("experts", "count"), [(1, 1), (2, 2), (5, 1), (5, 2), (7, 3), (4, 4)])
def test_equal_to_one_token_at_a_time(experts, count):
    layer = layer_of(experts=experts, experts_per_token=count)
    x = torch.randn(3, 7, 24, dtype=torch.float64, requires_grad=True)
    results = []
    for compute in (layer, lambda x: one_token_at_a_time(layer, x)):
        y = compute(x)
        y.square().sum().backward()
        results.append({"y": y.detach(), "x": x.grad.clone(), **gradients(layer)})
        x.grad = None
        layer.zero_grad()
    assert_all_close(*results)
    assert layer.counts.sum() == 21 * count and layer.dropped == 0


def test_an_expert_without_tokens_gets_a_gradient_of_zeros():
    layer = layer_of()
    layer.bias = torch.tensor([0.0, 0, -9, 0, 0])
    layer(torch.randn(2, 4, 24, dtype=torch.float64)).sum().backward()
    assert layer.counts[2] == 0
    assert all((p.grad == 0).all() for p in layer.experts["2"].parameters())
    layer.zero_grad()
    layer(torch.randn(0, 4, 24, dtype=torch.float64)).sum().backward()
    assert all((p.grad == 0).all() for p in layer.experts.parameters())


def test_a_model_with_experts_can_be_copied_after_a_pass():
    model = random_model(small())
    before = model(tokens_of())
    copied = copy.deepcopy(model)
    assert torch.equal(copied(tokens_of()), before)
    assert moe.moe_layers(model)[0].balance_loss is not None


def test_the_router_is_not_rounded():
    model = random_model(small()).float()
    layer = moe.moe_layers(model)[0]
    with autocast("bf16", "cpu"):
        assert layer.router_logits(torch.randn(1, 3, 24)).dtype == torch.float32
        assert model(tokens_of()).isfinite().all()
    assert model.to(torch.bfloat16)(tokens_of()).dtype == torch.bfloat16


# ---- against transformers


@pytest.mark.parametrize("seed", range(5))
def test_equal_to_transformers_in_both_directions(tmp_path, seed):
    from transformers import MixtralForCausalLM

    config = small(
        experts=3 + seed,
        experts_per_token=1 + seed % 3,
        kv_heads=[None, 2, 1][seed % 3],
        head_dim=[None, 10][seed % 2],
        tie_embeddings=seed % 2 == 1,
        rope_theta=[10000.0, 1e6][seed % 2],
        max_positions=128,
    )
    ours = random_model(config, seed)
    ours.save_pretrained(tmp_path / "ours", max_shard_bytes=[5 * 10**9, 20000][seed % 2])
    theirs, report = MixtralForCausalLM.from_pretrained(
        tmp_path / "ours",
        output_loading_info=True,
        dtype=torch.float64,
        experts_implementation="eager",  # the others do not support fp64
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(p.numel() for p in theirs.parameters()) == ours.parameter_count()
    tokens = tokens_of(2, 20)
    close = {"rtol": 1e-5, "atol": 1e-5}  # theirs normalizes and routes in fp32
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, **close)

    cross_entropy(ours(tokens), tokens).backward()
    torch.nn.functional.cross_entropy(
        theirs(tokens).logits.flatten(0, 1), tokens.flatten()
    ).backward()
    for index, layer in enumerate(moe.moe_layers(ours)):
        other = theirs.model.layers[index].mlp
        torch.testing.assert_close(layer.gate.weight.grad, other.gate.weight.grad, **close)
        for number, expert in layer.experts.items():
            both = torch.cat((expert.w1.weight.grad, expert.w3.weight.grad))
            e = int(number)
            torch.testing.assert_close(both, other.experts.gate_up_proj.grad[e], **close)
            torch.testing.assert_close(
                expert.w2.weight.grad, other.experts.down_proj.grad[e], **close
            )

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB" if seed % 2 else "5GB")
    back = GPT.from_pretrained(tmp_path / "theirs")
    small_models.assert_comes_back(back, ours, tokens)
    assert GPT.from_pretrained(tmp_path / "ours").config == config


def test_a_config_that_leaves_things_out_means_mixtrals_defaults():
    from transformers import MixtralConfig

    hf = {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
          "num_hidden_layers": 32, "num_attention_heads": 32,
          "intermediate_size": 14336}
    ours, theirs = GPTConfig.from_hf(hf), MixtralConfig()
    assert (ours.experts, ours.experts_per_token) == (8, 2)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"] == 1e6
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.key_value_heads == theirs.num_key_value_heads
    assert ours.to_hf()["num_local_experts"] == theirs.num_local_experts
    with pytest.raises(ValueError, match="sliding_window 4096 is not supported"):
        GPTConfig.from_hf({**hf, "sliding_window": 4096})
    with pytest.raises(ValueError, match=r"router_jitter_noise 0\.1 is not supported"):
        GPTConfig.from_hf({**hf, "router_jitter_noise": 0.1})


# ---- sizes


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"experts": 0}, "experts 0 is not an integer of at least 1"),
        ({"experts_per_token": 0}, "experts_per_token 0 is not an integer"),
        ({"experts_per_token": 6}, "experts_per_token 6 is more than the number of experts, 5"),
        ({"mlp_bias": True}, "mlp_bias does not work with experts 5"),
        ({"attention_bias": True}, "attention_bias does not work with experts 5"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        small(**changes)


@pytest.mark.parametrize("changes", [{}, {"experts": 7, "experts_per_token": 3, "kv_heads": 2}])
def test_formulas_count_what_is_there(changes):
    config = small(**changes)
    model = random_model(config)
    assert config.parameter_count() == model.parameter_count()
    idle = config.experts - config.experts_per_token
    expert = sum(p.numel() for p in moe.moe_layers(model)[0].experts["0"].parameters())
    assert config.active_parameter_count() == model.parameter_count() - 2 * idle * expert
    counter = FlopCounterMode(display=False)
    tokens = tokens_of(3, 19)
    with counter, sdpa_kernel(SDPBackend.MATH):
        cross_entropy(model(tokens), tokens).backward()
    assert counter.get_total_flops() == config.flops_per_token(19) * tokens.numel()


def test_known_sizes():
    mixtral = GPTConfig(vocab_size=32000, hidden_size=4096, layers=32, heads=32, kv_heads=8,
                        intermediate_size=14336, experts=8, experts_per_token=2)
    assert mixtral.parameter_count() == 46_702_792_704
    assert mixtral.active_parameter_count() == 12_879_925_248
    dense = GPTConfig(hidden_size=64)
    assert dense.active_parameter_count() == dense.parameter_count()


# ---- capacity


def test_first_choices_go_before_second_ones_and_earlier_tokens_before_later_ones():
    chosen = torch.tensor([[[0, 1], [0, 2], [0, 1], [1, 0]]])  # (1, 4, 2)
    kept = moe.within_capacity(chosen, experts=3, capacity=2)
    assert kept.tolist() == [[[True, True], [True, True], [False, False], [True, False]]]
    assert moe.capacity_of(tokens=4, count=2, experts=3, factor=1.0) == 3
    assert moe.capacity_of(tokens=4, count=2, experts=3, factor=0.5) == 2


def test_a_dropped_choice_adds_nothing():
    layer = layer_of()
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    layer.capacity_factor = 1.0
    y = layer(x)
    chosen, weights, _ = moe.choose(layer.router_logits(x), 2)
    kept = moe.within_capacity(chosen, 5, math.ceil(6 * 2 / 5))
    assert 0 < layer.dropped == int((~kept).sum())
    expected = torch.zeros_like(x)
    for place in kept.nonzero().tolist():
        expert = layer.experts[str(chosen[tuple(place)].item())]
        expected[place[0], place[1]] += weights[tuple(place)] * expert(x[place[0], place[1]])
    torch.testing.assert_close(y, expected)
    layer.capacity_factor = 5.0
    whole = layer(x)
    assert layer.dropped == 0
    layer.capacity_factor = None
    assert torch.equal(whole, layer(x))


def test_a_sequence_is_dropped_from_in_the_same_way_whoever_its_neighbours_are():
    layer = layer_of()
    layer.capacity_factor = 0.8
    x = torch.randn(4, 6, 24, dtype=torch.float64)
    together = layer(x)
    torch.testing.assert_close(together, torch.cat([layer(row) for row in x.split(1)]))


# ---- balance


def test_the_balance_loss_at_its_ends():
    even = torch.full((1, 4, 4), 0.25)
    one_each = torch.arange(4).view(1, 4, 1)
    assert moe.balance_loss(even, one_each).item() == pytest.approx(1.0)
    certain = torch.tensor([1.0, 0, 0, 0]).expand(1, 4, 4)
    assert moe.balance_loss(certain, torch.zeros(1, 4, 1, dtype=torch.long)).item() == 4.0


def test_the_balance_loss_of_one_sequence_is_that_of_transformers():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(1, 11, 5, dtype=torch.float64)
    chosen, _, probabilities = moe.choose(logits, 2)
    theirs = load_balancing_loss_func((logits[0],), num_experts=5, top_k=2)
    # theirs sums f_e over the k choices, so it is k times as large
    torch.testing.assert_close(2 * moe.balance_loss(probabilities, chosen).float(), theirs)


def balanced_gradients(weight, recomputed="none", parts=1):
    model = random_model(small())
    recompute(model, recomputed)
    x = tokens_of(4)
    moe.set_balance(model, weight)
    for part in x.chunk(parts):
        cross_entropy(model(part), part, reduction="sum").backward()
    return gradients(model)


def test_set_balance_adds_the_gradient_of_the_balance_losses():
    model = random_model(small())
    x = tokens_of(4)
    loss = cross_entropy(model(x), x, reduction="sum")
    (loss + 0.3 * 4 * sum(layer.balance_loss for layer in moe.moe_layers(model))).backward()
    expected = gradients(model)
    assert_all_close(balanced_gradients(0.3), expected)
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    assert not torch.allclose(balanced_gradients(0.0)[gate], expected[gate])
    for mode in ("full", "selective"):
        assert_all_close(balanced_gradients(0.3, mode), expected)
    assert_all_close(balanced_gradients(0.3, parts=3), expected)  # of 2, 1 and 1 sequences


def test_a_compiled_model_is_balanced_too():
    model = random_model(small(layers=1))
    moe.set_balance(model, 0.3)
    x = tokens_of(4)
    cross_entropy(model(x), x, reduction="sum").backward()
    expected = gradients(model)
    model.zero_grad()
    keep_from_compiling(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    cross_entropy(compiled(x), x, reduction="sum").backward()
    assert_all_close(gradients(model), expected)


def test_the_balance_loss_evens_out_the_use_of_the_experts():
    torch.manual_seed(0)
    layer = layer_of()
    x = torch.randn(4, 32, 24, dtype=torch.float64) + 1
    optimizer = torch.optim.SGD([layer.gate.weight], lr=0.05)
    spread = []
    for _ in range(60):
        layer(x)
        spread.append((layer.counts.max() / layer.counts.double().mean()).item())
        optimizer.zero_grad()
        layer.balance_loss.backward()
        optimizer.step()
    assert spread[-1] < 1.3 < spread[0]


def test_the_bias_evens_out_the_use_of_the_experts_and_leaves_the_weights():
    layer = layer_of()
    x = torch.randn(4, 32, 24, dtype=torch.float64) + 1
    layer(x)
    first = layer.counts
    moe.move_bias(layer, first, rate=0.5)
    assert torch.equal(layer.bias, 0.5 * (first.double().mean() - first).sign())
    layer.bias = None
    for _ in range(300):
        layer(x)
        moe.move_bias(layer, layer.counts, rate=5e-3)
    assert layer.counts.max() < 1.3 * layer.counts.double().mean() < first.max()
    chosen, weights, probabilities = moe.choose(layer.router_logits(x), 2, layer.bias)
    likely = probabilities.gather(-1, chosen)
    torch.testing.assert_close(weights, likely / likely.sum(-1, keepdim=True))


def test_names_of_experts():
    names = [name for name, _ in random_model(small(layers=1)).named_parameters()]
    experts = [name for name in names if moe.is_expert(name)]
    assert len(experts) == 5 * 3
    assert "model.layers.0.block_sparse_moe.experts.4.w2.weight" in experts
    assert not moe.is_expert("model.layers.0.block_sparse_moe.gate.weight")
