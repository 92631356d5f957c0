"""Prompt tuning on a split model: gradient, prompt, traffic and memory against one rank."""

import math
from contextlib import ExitStack
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.prompts.test_tuning import TOKENIZER, new_model
from tests.tiers import first
from utils.measure.memory import Memory
from utils.measure.traffic import Traffic
from utils.models.gpt import GPTConfig
from utils.parallel.mesh import make_mesh
from utils.parallel.tensor import tensor_parallel
from utils.prompts import (
    Example,
    PromptConfig,
    PromptedEmbedding,
    draw_prompt,
    frozen,
    prompt_loss,
    prompted,
    tune,
)
from utils.prompts.data import IGNORED, encode, padded
from utils.prompts.parallel import PromptedRanks, tune_on_ranks
from utils.ranks import RankError, Ranks

P, C, LAYERS = 3, 24, 5
CONFIGS = {  # odd vocabularies; key-value heads for every rank, for some, one for all
    "grouped queries": GPTConfig(257, C, LAYERS, heads=6, kv_heads=3, intermediate_size=37),
    "tied": GPTConfig(259, C, LAYERS, heads=4, kv_heads=4, tie_embeddings=True),
    "one key-value head": GPTConfig(257, C, LAYERS, heads=4, kv_heads=1, attention_bias=True),
}
EXAMPLES = [Example("x" * n + " is ", "abc"[: 1 + n % 3]) for n in (1, 4, 2, 7, 3, 5, 6)]
CONFIG = PromptConfig(length=P, lr=0.05, steps=3, batch=5, init="random", cooldown=0.0)
PLACES = {  # mesh sizes, options of the pipeline
    "tp 2": ({"tp": 2}, {}),
    "pp 2": ({"pp": 2}, {"micro_batches": 3}),
    "pp 2, interleaved": ({"pp": 2}, {"micro_batches": 4, "schedule": "interleaved", "chunks": 2}),
    "pp 2, zero bubble": ({"pp": 2}, {"micro_batches": 2, "schedule": "zero-bubble"}),
    "dp 2": ({"dp": 2}, {}),
    "pp 3": ({"pp": 3}, {"layers": (range(0, 3), range(3, 4), range(4, 5))}),
    "tp 4": ({"tp": 4}, {}),
    "dp 2, tp 2": ({"dp": 2, "tp": 2}, {}),
    "pp 2, tp 2": ({"pp": 2, "tp": 2}, {"micro_batches": 3}),
    "dp 2, pp 2": ({"dp": 2, "pp": 2}, {"micro_batches": 2}),
}


@pytest.fixture(scope="module")
def pools():
    """Pools by number of ranks, started on first use."""
    with ExitStack() as stack:
        yield cache(lambda size: stack.enter_context(Ranks(size, device="cpu")))


def first_of(model):
    return draw_prompt(model, P).double()


def alone(config, dtype=torch.float64):
    """Return (loss, gradient of the first prompt, tuned prompt, losses) on one rank."""
    model = new_model(config, dtype)
    prompt = nn.Parameter(first_of(model).to(dtype))
    ranks = PromptedRanks(new_model(config, dtype), prompt, make_mesh())
    loss = ranks.backward(encode(EXAMPLES, TOKENIZER))
    tuned, history = tune(model, TOKENIZER, EXAMPLES, CONFIG)
    return loss, prompt.grad, tuned, [row["loss"] for row in history]


def together(config, sizes, pipeline):
    """The same on each rank of a mesh; the gradient is None on later stages."""
    mesh = make_mesh(**sizes)
    prompt = nn.Parameter(first_of(new_model(config)))
    ranks = PromptedRanks(new_model(config), prompt, mesh, **pipeline)
    loss = ranks.backward(encode(EXAMPLES, TOKENIZER))
    gradient = None if ranks.prompt is None else ranks.prompt.grad
    weights = [p for part in ranks.parts for p in part.parameters() if p is not ranks.prompt]
    assert all(weight.grad is None for weight in weights)
    tuned, history = tune_on_ranks(new_model(config), TOKENIZER, EXAMPLES, CONFIG, mesh, **pipeline)
    mesh.close()
    return mesh.pp.index, loss, gradient, tuned, [row["loss"] for row in history]


expected = cache(lambda name: alone(CONFIGS[name]))


@pytest.mark.parametrize(
    ("place", "name"),
    first(7, [  # key-value heads matter only to tensor parallelism, a tied matrix to pipelines
        ("tp 2", "grouped queries"),
        ("tp 4", "one key-value head"),
        ("pp 2, zero bubble", "tied"),
        ("pp 3", "tied"),
        ("pp 2, tp 2", "tied"),
        ("dp 2", "grouped queries"),
        ("dp 2, tp 2", "one key-value head"),
        ("tp 2", "tied"),
        ("tp 2", "one key-value head"),
        ("tp 4", "grouped queries"),
        ("tp 4", "tied"),
        ("pp 2", "tied"),
        ("pp 2, interleaved", "tied"),
        ("dp 2, pp 2", "tied"),
    ]),
)
def test_equal_to_one_rank(pools, place, name):
    sizes, pipeline = PLACES[place]
    loss, gradient, tuned, losses = expected(name)
    assert gradient.abs().max() > 1e-4
    results = pools(math.prod(sizes.values())).run(together, CONFIGS[name], sizes, pipeline)
    for stage, *found in results:
        assert found[0] == pytest.approx(loss, rel=1e-12)
        assert (found[1] is None) == (stage > 0)
        if stage == 0:
            torch.testing.assert_close(found[1], gradient, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(found[2], tuned, rtol=1e-7, atol=1e-9)
        assert torch.equal(found[2], results[0][3])  # ranks agree bit for bit
        assert found[3] == pytest.approx(losses, rel=1e-9)


def test_the_loss_of_one_rank_is_that_of_the_plain_model():
    config = CONFIGS["tied"]
    model = new_model(config)
    prompt = nn.Parameter(first_of(model))
    with frozen(model), prompted(model, prompt):
        loss = prompt_loss(model, *padded(encode(EXAMPLES, TOKENIZER)))
        loss.backward()
    found, gradient, _, _ = alone(config)
    assert found == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient, prompt.grad, rtol=1e-9, atol=1e-13)


# ---- traffic


def traffic_of(config, sizes, pipeline):
    """Return (stage, {(operation, axis): sorted payloads}) of one step on this rank."""
    mesh = make_mesh(**sizes)
    prompt = nn.Parameter(first_of(new_model(config)))
    ranks = PromptedRanks(new_model(config), prompt, mesh, **pipeline)
    rows = encode(EXAMPLES, TOKENIZER)
    with Traffic() as traffic:
        ranks.backward(rows)
    names = {getattr(mesh, axis).group.group_name: axis for axis in sizes if sizes[axis] > 1}
    said = {}
    for event in traffic.events:
        key = (event.op, names[event.group])
        said.setdefault(key, []).append(event.payload)
    mesh.close()
    return mesh.pp.index, {key: sorted(payloads) for key, payloads in said.items()}


def sizes_of(rows):
    """Return (rows, tokens per row, answer tokens) of a micro-batch."""
    tokens, targets = padded(rows)
    return (*tokens.shape, int((targets != IGNORED).sum()))


def test_what_tensor_parallel_ranks_say(pools):
    B, T, N = sizes_of(encode(EXAMPLES, TOKENIZER))
    layer = B * (P + T) * C  # two per layer in each direction
    numbers = [B * T * C, *[layer] * 4 * LAYERS]  # the embedding of the real tokens, the layers
    numbers += [N, 2 * N, N * C]  # the loss; lm_head's backward pass
    for _, said in pools(2).run(traffic_of, CONFIGS["grouped queries"], {"tp": 2}, {}):
        assert said == {("all_reduce", "tp"): sorted(8 * n for n in numbers)}  # fp64


def test_what_pipeline_ranks_say(pools):
    rows = encode(EXAMPLES, TOKENIZER)
    cut = [sizes_of(part) for part in (rows[:3], rows[3:5], rows[5:])]
    hidden = sorted(8 * B * (P + T) * C for B, T, _ in cut)
    for stage, said in pools(2).run(traffic_of, CONFIGS["tied"], {"pp": 2}, {"micro_batches": 3}):
        # hidden states forward, their gradients backward; then the loss
        assert said == {
            ("send", "pp"): hidden, ("recv", "pp"): hidden, ("broadcast", "pp"): [8]
        }, stage


def test_data_parallel_ranks_exchange_the_prompt_alone(pools):
    for _, said in pools(2).run(traffic_of, CONFIGS["tied"], {"dp": 2}, {}):
        assert said == {("all_reduce", "dp"): [8 * (P * C + 1)]}  # and the loss
    for stage, said in pools(4).run(
        traffic_of, CONFIGS["tied"], {"dp": 2, "pp": 2}, {"micro_batches": 2}
    ):
        numbers = P * C + 1 if stage == 0 else 1
        assert said[("all_reduce", "dp")] == [8 * numbers]


# ---- memory


def memory_of(config, sizes, pipeline, everything):
    """Return (stage, {kind: bytes}) after two fp32 steps on the prompt, or on all weights."""
    mesh = make_mesh(**sizes)
    model = new_model(config, torch.float32)
    prompt = nn.Parameter(first_of(model).float())
    ranks = PromptedRanks(model, prompt, mesh, **pipeline)
    del model
    held = nn.ModuleList(ranks.parts)
    if everything:
        held.requires_grad_(True)
    learned = [p for p in held.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=0.01) if learned else None
    with Memory(model=held, optimizer=optimizer) as memory:
        for _ in range(2):
            ranks.backward(encode(EXAMPLES, TOKENIZER))
            if optimizer:
                optimizer.step()
        found = memory.now()
    mesh.close()
    found["weights"] = sum(p.numel() for p in held.parameters() if p is not ranks.prompt)
    found["tensors"] = len(learned)
    return mesh.pp.index, found


@pytest.mark.parametrize("place", first(1, ["pp 2, tp 2", "tp 2", "pp 2"]))
def test_only_the_prompt_has_gradients_and_state(pools, place):
    sizes, pipeline = PLACES[place]
    run = pools(math.prod(sizes.values())).run
    for stage, held in run(memory_of, CONFIGS["grouped queries"], sizes, pipeline, False):
        learned = P * C if stage == 0 else 0
        assert held["gradients"] == 4 * learned
        assert held["optimizer"] == 8 * learned + 4 * held["tensors"]
        assert held["tensors"] == (stage == 0)
    for stage, held in run(memory_of, CONFIGS["grouped queries"], sizes, pipeline, True):
        learned = held["weights"] + (P * C if stage == 0 else 0)
        assert held["gradients"] == 4 * learned
        assert held["optimizer"] == 8 * learned + 4 * held["tensors"]


# ---- refusals


def with_the_sequence_split():
    model = new_model(CONFIGS["tied"])
    tensor_parallel(model, make_mesh(tp=dist.get_world_size()).tp, sequence_parallel=True)
    PromptedEmbedding(model.model.embed_tokens, torch.zeros(P, C))


def with_too_few_rows():
    prompt = nn.Parameter(torch.zeros(P, C))
    ranks = PromptedRanks(new_model(CONFIGS["tied"]), prompt, make_mesh(dp=2))
    ranks.backward(encode(EXAMPLES[:1], TOKENIZER))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (with_the_sequence_split, "without sequence_parall"),
        (with_too_few_rows, "batch 1 leaves some"),
    ],
)
def test_what_is_refused(pools, function, sentence):
    with pytest.raises(RankError, match=sentence):
        pools(2).run(function)
