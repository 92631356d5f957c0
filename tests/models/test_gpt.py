"""The model: equal to transformers at random sizes, exact formulas, checkpoints both ways."""

import os
import random

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.small_models import assert_comes_back, random_model, small
from utils.models import hf_format
from utils.models import ops as pointwise
from utils.models.gpt import GPT, GPTConfig, cross_entropy

pytestmark = pytest.mark.usefixtures("one_thread")

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # silences deepspeed inside transformers
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def random_config(seed):
    """Odd sizes of every kind, determined by the seed."""
    draw = random.Random(seed)
    qwen = seed % 4 == 3
    kv_heads = draw.choice([1, 1, 2, 3])
    heads = kv_heads * draw.choice([1, 2, 3])
    head_dim = draw.choice([2, 6, 10, 16])
    return GPTConfig(
        vocab_size=draw.choice([61, 97, 131, 256]),
        hidden_size=heads * draw.choice([6, 10, 14]),
        layers=draw.choice([1, 2, 3]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw.choice([None, head_dim]),
        intermediate_size=draw.choice([None, 31, 45]),
        max_positions=128,
        rope_theta=draw.choice([10000.0, 500000.0]),
        rope_scaling=draw.choice([None, None, {"rope_type": "linear", "factor": 3.0}, LLAMA3]),
        norm_eps=draw.choice([1e-5, 1e-6]),
        tie_embeddings=draw.random() < 0.5,
        attention_bias=draw.random() < 0.3 and not qwen,
        mlp_bias=draw.random() < 0.3 and not qwen,
        qkv_bias=qwen,
        eos_token_id=draw.choice([None, 2, (2, 3)]),
    )


# ---- against transformers


@pytest.mark.parametrize("seed", range(12))
def test_equal_to_transformers_in_both_directions(tmp_path, seed):
    from transformers import AutoModelForCausalLM

    config = random_config(seed)
    ours = random_model(config, seed)
    limit = [5 * 10**9, 4000][seed % 2]  # one file, or shards
    ours.save_pretrained(tmp_path / "ours", max_shard_bytes=limit)
    assert (tmp_path / "ours" / hf_format.INDEX).exists() == bool(seed % 2)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(p.numel() for p in theirs.parameters()) == ours.parameter_count()

    for length in (1, 7, 33):
        tokens = torch.randint(config.vocab_size, (3, length))
        assert_close(ours(tokens), theirs(tokens).logits)
    tokens = torch.randint(config.vocab_size, (2, 20))
    cross_entropy(ours(tokens), tokens).backward()
    torch.nn.functional.cross_entropy(
        theirs(tokens).logits.flatten(0, 1), tokens.flatten()
    ).backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, gradients[name].grad)

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="4KB" if seed % 2 else "5GB")
    back = GPT.from_pretrained(tmp_path / "theirs")
    assert_comes_back(back, ours, tokens)
    assert GPTConfig.from_hf(config.to_hf()) == GPT.from_pretrained(tmp_path / "ours").config


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_config_comes_back_equal(tmp_path):
    for seed in range(20):
        config = random_config(seed)
        shorter = GPTConfig.from_hf(config.to_hf())
        assert shorter.to_hf() == config.to_hf()
    config = small(kv_heads=2, tie_embeddings=True, eos_token_id=(1, 2))
    GPT(config).save_pretrained(tmp_path / "model")
    assert GPT.from_pretrained(tmp_path / "model").config == config


def test_older_files_place_rope_elsewhere():
    base = small().to_hf()
    del base["rope_parameters"]
    assert GPTConfig.from_hf({**base, "rope_theta": 5e5}).rope_theta == 5e5
    assert GPTConfig.from_hf(base).rope_theta == 10000.0
    old = {**base, "rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert GPTConfig.from_hf(old).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    inside = {**base, "rope_scaling": {**LLAMA3, "rope_theta": 7.0}}
    assert GPTConfig.from_hf(inside).rope_theta == 7.0
    assert GPTConfig.from_hf(inside).rope_scaling == LLAMA3


# ---- formulas


@pytest.mark.parametrize("seed", range(6))
def test_formulas_count_what_is_there(seed):
    config = random_config(seed)
    model = GPT(config)
    assert config.parameter_count() == model.parameter_count()
    tokens = torch.randint(config.vocab_size, (3, 19))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # on a CPU the fused kernel is not counted
        cross_entropy(model(tokens), tokens).backward()
    assert counter.get_total_flops() == config.flops_per_token(19) * tokens.numel()
    assert config.flops_per_token(19, causal=True) < config.flops_per_token(19)


def test_known_sizes():
    llama2 = {"vocab_size": 32000, "hidden_size": 4096, "layers": 32, "heads": 32}
    assert GPTConfig(**llama2, intermediate_size=11008).parameter_count() == 6_738_415_616
    llama32 = GPTConfig(vocab_size=128256, hidden_size=2048, layers=16, heads=32, kv_heads=8,
                        head_dim=64, intermediate_size=8192, tie_embeddings=True)
    assert llama32.parameter_count() == 1_235_814_400


# ---- small parts


def test_gradients_by_hand_are_right():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    angle = torch.rand(3, 1, 4, dtype=torch.float64)
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin()), -1)
    assert torch.autograd.gradcheck(lambda x, w: pointwise.rms_norm(x, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda x: pointwise.rotate(x, cos, sin), (x,))
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(pointwise.rms_norm(x, weight, 1e-5), expected)


def test_the_future_is_not_seen():
    model = random_model(small(kv_heads=2))
    tokens = torch.randint(61, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_cross_entropy_of_half_precision_is_taken_in_fp32():
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    targets = torch.randint(5, (2, 3))
    each = cross_entropy(logits, targets, reduction="none")
    assert each.dtype == torch.float32 and each.shape == (6,)
    torch.testing.assert_close(each.mean(), cross_entropy(logits, targets))


def test_bf16_is_near_fp32():
    model = random_model(small())
    tokens = torch.randint(61, (2, 9))
    exact = model(tokens)
    rounded = model.to(torch.bfloat16)(tokens)
    assert rounded.dtype == torch.bfloat16
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max()


def test_generate():
    model = random_model(small(max_positions=8))
    start = torch.randint(61, (2, 3))
    tokens = model.generate(start, 10, seed=1)
    assert tokens.shape == (2, 13) and torch.equal(tokens[:, :3], start)
    assert torch.equal(tokens, model.generate(start, 10, seed=1))
    assert not torch.equal(tokens, model.generate(start, 10, seed=2))
    greedy = model.generate(start, 2, temperature=0)
    assert torch.equal(greedy[:, 3], model(start)[:, -1].argmax(-1))
    assert torch.equal(model.generate(start, 2, top_k=1), greedy)
    with pytest.raises(ValueError, match="temperature -1 must be at least 0"):
        model.generate(start, 1, temperature=-1)
    with pytest.raises(ValueError, match="sequence of 9 tokens is longer than max_positions 8"):
        model(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_without_memory_draws_nothing(seed):
    config, state = random_config(seed), torch.get_rng_state()
    model = GPT.without_memory(config)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in model.parameters())
    shapes = [[(n, p.shape) for n, p in m.named_parameters()] for m in (model, GPT(config))]
    assert shapes[0] == shapes[1]
