"""Every mix of the kinds of parallelism reproduces the single-rank run."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.training.mix_traffic import has_formula, traffic_by_formula
from tests.training.mixes import AXES, COUNTED, MIXES, PLACES, PLAIN, RANKS, TABLE, feasible
from tests.training.pairwise import pairs, pairs_of, read_rows
from tests.training.train_runs import assert_same_run, plain, run, totals
from utils.memory.precision import LossScaler
from utils.models.gpt import GPT, GPTConfig
from utils.parallel.parallelize import draw_weights
from utils.ranks import Ranks
from utils.training.config import resumed
from utils.training.train import train


@pytest.fixture(scope="module", params=RANKS)
def pool(request):
    """Warm ranks; pytest groups the tests by their number."""
    torch.set_num_threads(1)
    with Ranks(request.param, device="cpu", timeout=60) as ranks:
        yield ranks


def on(ranks, what, values, **options):
    """Parametrize a test with `what`, each value on a pool of ranks(value) ranks."""
    pairs_ = [(ranks(value), value) for value in values]
    return pytest.mark.parametrize(f"pool, {what}", pairs_, indirect=["pool"], **options)


@on(lambda mix: mix.ranks, "mix", MIXES + COUNTED, ids=str)
def test_a_mix_is_the_plain_run(pool, mix):
    counted = has_formula(mix.config)
    rows, parameters, events = pool.run(run, mix.config, count=counted)[0]
    alone = mix.alone()
    assert_same_run((rows, parameters), plain(alone)[:2], alone)
    if counted:
        sent = totals(events)
        sent.pop("recv", None)
        assert sent == traffic_by_formula(mix.config)


def test_every_pair_that_can_meet_is_in_a_mix():
    rows = read_rows(TABLE, AXES)
    seen = set().union(*map(pairs, rows))
    missing = pairs_of(AXES) - seen
    assert len(seen) > 1000 and not [pair for pair in missing if feasible(dict(pair))]
    assert {mix.ranks for mix in MIXES + COUNTED} == set(RANKS)
    assert all(has_formula(mix.config) for mix in COUNTED)


# ---- a run resumes in any other mix

STEADY = replace(PLAIN, precision="fp64", cooldown=0.0, seq=12, kv_heads=2, steps=7)
DENSE = replace(STEADY, tie=True, optimizer="muon", layers=5)
MIXTURE = replace(STEADY, experts=3, optimizer="adamw", layers=4)
CHAINS = [  # each link resumes the last one and takes one step; {} is one plain rank
    (
        DENSE,
        {"dp": 2, "pp": 2, "shard": "1", "schedule": "zero-bubble", "micro_batches": 3},
        {"pp": 2, "tp": 2, "shard": "3", "sequence_parallel": True},
        {"cp": 2, "tp": 2, "shard": "3"},
        {},
        {"cp": 4, "context": "ulysses", "shard": "2"},
        {"dp": 2, "tp": 2, "shard": "1", "offload": "optimizer"},
        {"cp": 2, "pp": 2, "shard": "2", "schedule": "interleaved", "micro_batches": 2},
    ),
    (
        MIXTURE,
        {"dp": 4, "ep": 2},
        {"cp": 2, "dp": 2, "ep": 2, "shard": "1", "context": "gather"},
        {"dp": 2, "pp": 2, "ep": 2, "shard": "1"},
        {"cp": 4, "shard": "3"},
        {"dp": 2, "tp": 2, "ep": 2, "shard": "3"},
        {"pp": 4, "schedule": "gpipe", "micro_batches": 2},
        {"dp": 2, "tp": 2, "ep": 2},
    ),
]


@on(lambda chain: 4, "chain", CHAINS, ids=["dense", "experts"])
def test_a_run_goes_on_in_any_other_mix(pool, chain, tmp_path):
    model, *ways = chain
    folder, losses = str(tmp_path / "run"), []
    for step, way in enumerate(ways, start=1):
        options = {name: getattr(PLAIN, name) for name in PLACES} | {"dp": 1} | way
        options["save_format"] = "whole" if step % 2 else "sharded"
        config = replace(model, **options, steps=step, out=folder)
        if step > 1:
            config = resumed(folder, **options, steps=step)
        rows, parameters, _ = pool.run(run, config)[0] if way else run(config)
        losses += [(row["loss"], row["grad_norm"]) for row in rows]
    whole = run(replace(model, out=str(tmp_path / "whole")))
    expected = [(row["loss"], row["grad_norm"]) for row in whole[0]]
    torch.testing.assert_close(losses, expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(parameters, whole[1], rtol=1e-5, atol=1e-8)
    for file in ("model.safetensors", "optimizer.safetensors"):
        mine, other = (load_file(tmp_path / name / file) for name in ("run", "whole"))
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-8)


SAME = [
    {"pp": 2, "tp": 2, "micro_batches": 2, "shard": "1"},
    {"dp": 2, "tp": 2, "shard": "3", "precision": "bf16"},
    {"cp": 2, "dp": 2, "context": "ulysses"},
]


@on(lambda way: 4, "way", SAME, ids=str)
def test_a_stopped_mix_goes_on_to_the_bit(pool, way, tmp_path):
    config = replace(STEADY, precision="fp32", optimizer="adamw", steps=3, dp=1)
    config = replace(config, **way)
    whole = pool.run(run, config)[0]
    first = pool.run(run, replace(config, steps=1, out=str(tmp_path / "run")))[0]
    rest = pool.run(run, replace(resumed(tmp_path / "run", steps=3), out=None))[0]
    losses = [[row["loss"] for row in rows] for rows in (first[0] + rest[0], whole[0])]
    assert losses[0] == losses[1]
    assert all(torch.equal(value, whole[1][name]) for name, value in rest[1].items())


# ---- fp16 skips a step on all ranks or on none


def skipped_steps(config):
    """Return (skipped, loss scale) per step, starting from a scale that is far too large."""
    usual = LossScaler.__init__.__defaults__
    LossScaler.__init__.__defaults__ = (2.0**31, 2000)
    try:
        _, history = train(config)
    finally:
        LossScaler.__init__.__defaults__ = usual
    return [(row["grad_norm"] is None, row["loss_scale"]) for row in history]


@on(lambda way: 4, "way", [{"pp": 2, "tp": 2, "shard": "1"}], ids=str)
def test_ranks_of_a_mix_skip_together(pool, way):
    config = replace(STEADY, precision="fp16", optimizer="adamw", layers=2, steps=24, dp=1, **way)
    by_rank = pool.run(skipped_steps, config)
    assert all(steps == by_rank[0] for steps in by_rank)
    assert by_rank[0][0][0] and not by_rank[0][-1][0]


@on(lambda way: 4, "way", [{"shard": "2"}], ids=str)
def test_ranks_skip_what_one_rank_skips(pool, way):
    config = replace(STEADY, precision="fp16", optimizer="adamw", steps=16, dp=1)
    by_rank = pool.run(skipped_steps, replace(config, **way, dp=4))
    one = skipped_steps(replace(config, accumulate=4))  # fp16 sums of the same rows
    assert by_rank == [one] * 4 and {skipped for skipped, _ in one} == {True, False}


# ---- no rank ever holds the whole model


@pytest.mark.parametrize("tie, experts", [(True, 3), (False, None)])
def test_weights_are_drawn_one_at_a_time_and_the_same(tie, experts):
    config = GPTConfig(
        vocab_size=61, hidden_size=24, layers=2, heads=4, tie_embeddings=tie, experts=experts
    )
    torch.manual_seed(3)
    model, after = GPT(config), torch.get_rng_state()
    torch.manual_seed(3)
    drawn = {}
    draw_weights(config, drawn.__setitem__)
    assert torch.equal(torch.get_rng_state(), after)  # the next draw is the same too
    assert list(drawn) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(drawn[name], value) for name, value in model.named_parameters())


def what_is_returned(config):
    model, _ = train(config)
    return (dist.get_rank(), model is None, model and next(model.parameters()).device.type)


@on(lambda way: 4, "way", [{"pp": 2, "tp": 2}])
def test_only_rank_0_gets_the_model(pool, way):
    returned = pool.run(what_is_returned, replace(STEADY, steps=1, dp=1, **way))
    assert returned == [(0, False, "cpu"), *((rank, True, None) for rank in (1, 2, 3))]


def tokens_after_training(config):
    """The tokens that the trained model generates, on rank 0 only."""
    model, _ = train(config)
    if dist.is_initialized() and dist.get_rank():
        return None
    return model.generate(torch.arange(7)[None], 5, temperature=0)


@on(lambda way: 4, "way", [{"cp": 4}, {"cp": 2, "dp": 2, "ep": 2, "experts": 3}], ids=str)
def test_the_model_takes_whole_sequences_afterwards(pool, way):
    config = replace(STEADY, steps=1, dp=1, experts=way.get("experts"))
    expected = tokens_after_training(config)
    assert torch.equal(pool.run(tokens_after_training, replace(config, **way))[0], expected)


# ---- invalid splits are named


@on(
    lambda case: 4,
    "case",
    [
        ({"dp": 2, "tp": 4}, "world size 4 is not dp·tp·pp = 2·4·1 = 8: start 8 ranks"),
        ({"tp": 4, "heads": 2, "kv_heads": 2}, "tp 4 is more than the 2 attention heads"),
        ({"dp": 4, "ep": 3, "experts": 4}, "ep 3 does not divide dp 4"),
        ({"dp": 4, "batch": 3}, "batch 3 leaves some of 4 ranks without a row"),
        (
            {"dp": 2, "pp": 2, "batch": 5, "micro_batches": 3},
            "--micro-batches 3 leaves micro-batches empty",
        ),
    ],
    ids=lambda case: case[1][:20] if isinstance(case, tuple) else None,
)
def test_what_cannot_be_split_is_named(pool, case):
    options, sentence = case
    with pytest.raises(Exception, match=sentence):
        pool.run(run, replace(STEADY, **{"dp": 1, **options}))
