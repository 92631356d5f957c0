"""Every way to save memory reproduces the plain single-rank run: a matrix of all pairs."""

import math
from dataclasses import replace

import pytest

from tests.training.pairwise import pairs, pairs_of, read_rows
from tests.training.train_combinations import AXES, COMBINATIONS, PLAIN, TABLE, feasible
from tests.training.train_runs import assert_same_run, plain, run, totals
from utils.models.gpt import GPT
from utils.parallel.zero import owners
from utils.training.optimizer import is_block_matrix


def run_on(pools, combination):
    """The result of rank 0."""
    if combination.ranks == 1:
        return run(combination.config)
    count = combination.config.engine == "torch"
    return pools[combination.ranks].run(run, combination.config, count=count)[0]


def traffic_by_formula(combination):
    """Rank 0's traffic in one step, computed from the shapes of the parameters."""
    config, ranks = combination.config, combination.ranks
    model = GPT.without_memory(config.model_config())
    named = dict(model.named_parameters())
    kept = 8 if config.precision == "fp64" else 4  # bytes per weight and per gradient
    small = [24]  # the loss, the time, the stop flag
    small += [4] if config.precision == "fp16" else []  # the overflow flag
    small += [kept] if config.zero_stage() else []  # the squared gradient norm
    result = {"all_reduce": (len(small), sum(small))}
    if config.zero_stage() == 0:
        values = sum(parameter.numel() for parameter in named.values())
        return {"all_reduce": (len(small) + 1, sum(small) + kept * values)}
    if config.zero_stage() == 1:
        load = [0] * ranks
        sizes = [parameter.numel() for parameter in named.values()]
        for size, owner in zip(sizes, owners(sizes, ranks)):
            load[owner] += size
        row = max(load) * kept
        return {**result, "reduce_scatter": (1, ranks * row), "all_gather": (1, row)}

    # FSDP2 pads every first dimension to a multiple of the number of ranks
    parts, units = {}, {}
    for name, parameter in named.items():
        rows = math.ceil(parameter.shape[0] / ranks)
        parts[name] = rows * (parameter.numel() // parameter.shape[0])
        unit = unit_of(name, config.tie)
        units[unit] = units.get(unit, 0) + parts[name]
    reduced = config.accumulate * ranks * kept * sum(units.values())
    result["reduce_scatter"] = (config.accumulate * len(units), reduced)
    travels = 2 if config.precision in ("bf16", "fp16") else kept
    gathers = list(units.values())
    if config.zero_stage() == 3:
        gathers = config.accumulate * (gathers + [n for u, n in units.items() if u != "last"])
    result["all_gather"] = (len(gathers), travels * sum(gathers))
    if config.optimizer == "muon":  # gathers the update of every matrix
        matrices = [parts[name] for name in named if is_block_matrix(name, named[name])]
        calls, payload = result["all_gather"]
        result["all_gather"] = (calls + len(matrices), payload + kept * sum(matrices))
    return result


def unit_of(name, tied):
    """The unit that gathers a parameter; the last one stays gathered for the backward pass."""
    if ".layers." in name:
        return name.split(".")[2]
    return "first" if "embed" in name and not tied else "last"


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_a_combination_is_the_plain_run(pools, combination):
    rows, parameters, events = run_on(pools, combination)
    alone = combination.alone()
    assert_same_run((rows, parameters), plain(alone)[:2], alone)
    if events:
        assert totals(events) == traffic_by_formula(combination)


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_a_rank_with_fewer_held_out_batches_still_gives_its_part(pools, tmp_path, engine):
    """65 held-out rows in batches of 32: rank 0 has two batches, rank 1 has one."""
    text = tmp_path / "text"
    text.write_bytes(bytes(number * number % 251 for number in range(20 * (65 * 17 + 1))))
    config = replace(PLAIN, text=str(text), batch=4, steps=1, optimizer="adamw", precision="fp32")
    expected = run(config)[0][-1]["val_loss"]
    rows, *_ = pools[2].run(run, replace(config, shard="3", engine=engine))[0]
    assert rows[-1]["val_loss"] == pytest.approx(expected, rel=1e-6)


def test_the_matrix_covers_every_pair_that_goes_together():
    seen = set().union(*map(pairs, read_rows(TABLE, AXES)))
    missing = pairs_of(AXES) - seen
    assert len(seen) > 400 and not [pair for pair in missing if feasible(dict(pair))]
