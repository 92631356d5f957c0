"""The engine's answers are the training model's, whatever else is served."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from tests.serving.engines import ODD, TIED, reference, version_of
from tests.serving.export_models import new_model
from tests.serving.processes import PATIENCE
from tests.tiers import first
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.serving.engine.engine import Engine
from utils.serving.engine.request import SamplingParams
from utils.serving.export import export

# On a busy machine, waiting for cores would take most of these tests' time.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]

TEXTS = [
    "import os\n",
    "def main(args):\n    ",
    "The with statement is used to wrap the execution of a block with methods",
    "class Foo:\n    def __init__(self",
    "x",
    "for line in file:\n" * 12,
]


@pytest.mark.parametrize(("tp", "eager"), [(1, False), (2, True)])
def test_greedy_tokens_are_those_of_training(tp, eager, tmp_path, small_reference):
    """In a batch that requests join and leave at any time; long prompts are read in chunks."""
    prompts = [small_reference.tokenizer.encode(text) for text in TEXTS]
    expected = [small_reference.tokens(text, 16) for text in TEXTS]
    chance = random.Random(tp)
    wanted, served = {}, {}
    options = {"max_num_seqs": 5, "prefill_chunk": 32, "enforce_eager": eager}
    with Engine(version_of("small", tmp_path, tp), **options) as engine:
        streams = []
        for number in chance.sample(range(len(prompts)), len(prompts)) * 2:
            count = chance.randint(1, 16)
            company = engine.submit(prompts[number][:3], SamplingParams(max_tokens=50))
            streams.append(engine.submit(prompts[number], SamplingParams(max_tokens=count)))
            wanted[streams[-1].id] = expected[number][:count]
            served[streams[-1].id] = []
            one = chance.choice(streams)
            if len(served[one.id]) < len(wanted[one.id]):
                served[one.id] += one.read().tokens
            company.cancel()
        for stream in streams:
            if len(served[stream.id]) < len(wanted[stream.id]):
                served[stream.id] += stream.result().tokens
        assert engine.stats()["running"] == engine.stats()["kv_used"] == 0
    assert served == wanted


@pytest.mark.parametrize(("tp", "eager"), [(1, False), (2, True)])
def test_logits_that_are_not_finite_fail_their_request_alone(tp, eager, tmp_path):
    model = GPT.from_pretrained(new_model(tmp_path / "model", ODD))
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[9] = torch.nan
    tokenizer = Tokenizer.load(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    folder = export(tmp_path / "model", tmp_path / "repo", tp)
    good, expected = [5, 6, 7], reference(model, [5, 6, 7], 40)
    with Engine(folder, max_num_seqs=2, num_blocks=12, enforce_eager=eager) as engine:
        for sampling in (SamplingParams(8, logprobs=2), SamplingParams(8, 1.0, top_k=5)):
            company = engine.submit(good, SamplingParams(max_tokens=40))
            with pytest.raises(FloatingPointError, match="logits that are not finite"):
                engine.submit([9] * 60, sampling).result(PATIENCE)
            assert company.result(PATIENCE).tokens == expected
            prompts = [good, [1, 2, 3, 4] * 10, [8]]  # in blocks that the failed request freed
            streams = [engine.submit(tokens, SamplingParams(max_tokens=9)) for tokens in prompts]
            for tokens, stream in zip(prompts, streams):
                assert stream.result(PATIENCE).tokens == reference(model, tokens, 9)
        now = engine.stats()
    assert (now["requests_failed"], now["running"], now["kv_used"]) == (2, 0, 0)


@pytest.mark.parametrize("config, tp, eager", [(ODD, 1, True), (ODD, 4, False), (TIED, 2, False)])
def test_odd_sizes_biases_scaled_positions_and_prompts(config, tp, eager, tmp_path):
    virtual = {
        "kind": torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1)),
        "long": torch.randn(11, config.hidden_size, generator=torch.Generator().manual_seed(2)),
    }
    chance = random.Random(0)
    cases = []
    for number in range(9):
        tokens = [chance.randrange(config.vocab_size) for _ in range(chance.randint(1, 40))]
        name = (None, "kind", "long")[number % 3]
        cases.append(([] if number == 4 else tokens, name, chance.randint(1, 16)))
    cases.append(([3] * 70, "kind", config.max_positions - 75))  # to the last position
    folder = version_of(config, tmp_path, tp, virtual)
    model = GPT.from_pretrained(tmp_path / "model")
    with Engine(folder, max_num_seqs=4, prefill_chunk=8, enforce_eager=eager) as engine:
        streams = [
            engine.submit(tokens, SamplingParams(max_tokens=count), prompt=name)
            for tokens, name, count in cases
        ]
        served = [stream.result() for stream in streams]
    for (tokens, name, count), answer in zip(cases, served):
        new = reference(model, tokens, count, virtual.get(name))
        assert answer.tokens == new
        assert answer.finish == ("length" if len(new) == count else "stop")


SIZES = {
    "vocab_size": 301,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 37,
    "eos_token_id": None,
}
MISTRAL = MistralConfig(**SIZES, head_dim=10, sliding_window=None)
QWEN = Qwen2Config(**SIZES, tie_word_embeddings=True)


CASES = [(MISTRAL, 1, False), (QWEN, 2, False), (MISTRAL, 2, True), (QWEN, 1, True)]


@pytest.mark.parametrize("config, tp, eager", first(2, CASES))
def test_other_models_give_the_tokens_of_transformers(config, tp, eager, tmp_path):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config)
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.25)
    theirs.save_pretrained(tmp_path / "model")
    Tokenizer.train(["the ranks of the mesh and their parts"] * 3, 270).save(tmp_path / "model")
    prompts = torch.randint(301, (3, 21)).tolist()
    right = theirs.generate(torch.tensor(prompts), max_new_tokens=24, do_sample=False)
    folder = export(tmp_path / "model", tmp_path / "repo", tp)
    with Engine(folder, prefill_chunk=8, enforce_eager=eager) as engine:
        streams = [engine.submit(prompt, SamplingParams(max_tokens=24)) for prompt in prompts]
        assert [stream.result().tokens for stream in streams] == right[:, 21:].tolist()
