"""Full fine-tuning and LoRA: what they train, what they leave untouched, that they learn."""

import copy

import pytest
import torch

from utils.models.config import GPTConfig
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.prompts import Example, PromptConfig, batch_of, matches, prompt_loss
from utils.prompts.lora import (
    MATRICES,
    PeerConfig,
    learned_numbers,
    merged,
    prepared,
    tune_weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENIZER = Tokenizer()  # bytes
EXAMPLES = [Example(f"{name}:", " yes" if name in "ace" else " no") for name in "abcdef"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, hidden_size=32, layers=2, heads=2, tie_embeddings=True))
    with torch.no_grad():
        model.lm_head.weight *= 5  # frozen and tied, it would bound the logits too tightly
    return model


def test_full_tuning_is_adam_on_every_weight(model):
    config = PeerConfig("full", lr=1e-3, steps=3, batch=6, cooldown=0.0)
    before = copy.deepcopy(model.state_dict())
    tuned, history = tune_weights(model, TOKENIZER, EXAMPLES, config)
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=1e-3)
    for row in history:  # a batch has all examples: their order does not matter
        loss = prompt_loss(by_hand, *batch_of(EXAMPLES, TOKENIZER))
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(tuned.parameters(), by_hand.parameters()):
        assert torch.allclose(ours, theirs, atol=2e-4)  # Adam's first steps amplify rounding
    assert learned_numbers(tuned) == model.parameter_count()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_lora_learns_two_thin_matrices_beside_each(model):
    config = PeerConfig("lora", lr=0.02, steps=30, batch=6, rank=2)
    tuned, _ = tune_weights(model, TOKENIZER, EXAMPLES, config)
    named = dict(tuned.named_parameters())
    weights = {n: p for n, p in model.named_parameters() if n.endswith("proj.weight")}
    assert len(weights) == model.config.layers * len(MATRICES)
    assert learned_numbers(tuned) == sum(2 * sum(p.shape) for p in weights.values())
    for name, weight in model.named_parameters():
        kept = named[name.replace("proj.weight", "proj.base_layer.weight")]
        assert torch.equal(kept, weight) and not kept.requires_grad
    # what it computes: W + (alpha / rank) B A, with alpha = rank
    layer, x = tuned.model.layers[1].mlp.down_proj, torch.randn(3, model.config.mlp_size)
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = x @ (layer.base_layer.weight + B @ A).T
    assert B.abs().max() > 0 and torch.allclose(layer(x), expected, atol=1e-5)


def test_a_merged_adapter_is_a_plain_model_and_what_peft_makes_of_it(model):
    config = PeerConfig("lora", lr=0.02, steps=5, batch=6, rank=2, alpha=6)
    tuned, _ = tune_weights(model, TOKENIZER, EXAMPLES, config)
    plain, tokens = merged(tuned), torch.arange(40)[None]
    assert torch.allclose(plain(tokens), tuned(tokens), atol=1e-4)
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    for name, layer in tuned.named_modules():  # by peft, in place
        if hasattr(layer, "lora_A"):
            layer.merge()
            ours = plain.get_submodule(name).weight
            assert torch.allclose(ours, layer.base_layer.weight, atol=1e-6)
            assert not torch.equal(ours, model.get_submodule(name).weight)


def test_lora_begins_as_the_model_it_was_given(model):
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    state = torch.random.get_rng_state()
    lora = prepared(model, PeerConfig("lora", seed=1))
    assert torch.equal(lora(tokens), model(tokens))
    assert torch.equal(state, torch.random.get_rng_state())  # the global generator is untouched
    same, other = prepared(model, PeerConfig("lora", seed=1)), prepared(model, PeerConfig("lora"))
    a, b, c = (m.model.layers[0].mlp.up_proj.lora_A["default"].weight for m in (lora, same, other))
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize("config", [
    PeerConfig("full", lr=1e-2, steps=60, batch=4),
    PeerConfig("lora", lr=3e-2, steps=60, batch=4, rank=4),
])
def test_both_learn_and_generalize(model, config):
    yes = [Example(example.input, " yes") for example in EXAMPLES]
    assert not any(matches(model, TOKENIZER, yes))
    tuned, history = tune_weights(model, TOKENIZER, yes[:4], config)
    assert all(matches(tuned, TOKENIZER, yes))
    assert history[-1]["loss"] < history[0]["loss"] / 2


def test_schedule_and_order_are_those_of_prompt_tuning(model):
    peer, prompt = PeerConfig("full", lr=0.3, steps=9), PromptConfig(lr=0.3, steps=9)
    assert [peer.rate(step) for step in range(9)] == [prompt.rate(step) for step in range(9)]
    config = PeerConfig("full", steps=5, batch=2, seed=3)
    seen = []
    _, history = tune_weights(
        model, TOKENIZER, EXAMPLES, config, on_step=lambda row: seen.append(row) or len(seen) == 2
    )
    assert history == seen and len(history) == 2


@pytest.mark.parametrize(("options", "message"), [
    ({"kind": "half"}, "--kind 'half' is not one of full, lora"),
    ({"steps": 0}, "--steps 0 is too small: it takes 1 or more"),
    ({"rank": -1}, "--rank -1 is too small: it takes 1 or more"),
    ({"lr": 0.0}, "--lr 0.0 must be above 0"),
    ({"cooldown": 2.0}, "--cooldown 2.0 is not a fraction"),
])
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PeerConfig(**options)


def test_bad_runs_are_refused(model):
    with pytest.raises(ValueError, match="there are no examples"):
        tune_weights(model, TOKENIZER, [])
    with pytest.raises(ValueError, match="line 1"):
        tune_weights(model, TOKENIZER, [Example("a" * 3000, "b")])
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="weights or the first prompt are not finite"):
        tune_weights(broken, TOKENIZER, EXAMPLES)
