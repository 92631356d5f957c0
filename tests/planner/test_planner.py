"""The planner's arithmetic: exact parameters, FLOPs, memory, search, command line."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from utils.models.config import GPTConfig
from utils.parallel.context import WAYS
from utils.planner import MACHINES, MODELS, Machine, Model, Strategy, kernels, network, plan, search
from utils.planner import __main__ as command
from utils.planner.machine import ANY, Level
from utils.planner.search import TOKENS, candidates
from utils.planner.strategy import CONTEXT, OVERLAPS, Columns

A100 = MACHINES["dgx-a100"]


# ---- parameters and FLOPs


@pytest.mark.parametrize(
    ("name", "parameters"),
    {
        "gpt2": 124_439_808,
        "gpt2-xl": 1_557_611_200,
        "llama-7b": 6_738_415_616,
        "llama2-13b": 13_015_864_320,
        "llama2-70b": 68_976_648_192,
        "llama3-8b": 8_030_261_248,
        "llama3-70b": 70_553_706_496,
        "llama3-405b": 405_853_388_800,
        "mixtral-8x7b": 46_702_792_704,
    }.items(),
)
def test_parameters_are_those_of_the_released_checkpoints(name, parameters):
    assert MODELS[name].parameters == parameters


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("megatron", "1t"))])
def test_parameters_and_flops_follow_megatrons_formulas(name):
    """Narayanan et al. 2021: P = 12lh²(1 + 13/12h + (V+s)/12lh), without the last norm."""
    model = MODELS[name]
    h, layers, v, s, batch = model.hidden_size, model.layers, model.vocab_size, model.seq, 8
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert model.parameters == round(formula) + 2 * h
    with_recompute = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    counted = model.flops(batch) + model.recomputed_flops("full", batch)
    assert counted == pytest.approx(with_recompute, rel=1e-12)
    # Korthikanti et al. 2022: a recomputed forward pass of attention counts twice
    selective = 72 * batch * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    selective += 4 * batch * s**2 * h * layers
    counted = model.flops(batch) + model.recomputed_flops("selective", batch)
    assert counted == pytest.approx(selective, rel=1e-12)


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(),
        GPTConfig(1000, 96, 3, 4, kv_heads=2, tie_embeddings=True),
        GPTConfig(61, 24, 2, 6, kv_heads=3, head_dim=8, intermediate_size=40),
    ],
)
def test_the_courses_model_costs_what_its_config_says(config):
    model = Model.of(config, seq=64)
    assert model.parameters == config.parameter_count()
    assert model.flops() == 64 * config.flops_per_token(64)


def test_experts_count_as_the_config_says():
    config = GPTConfig(256, 64, 2, 4, experts=8, experts_per_token=2)
    model = Model.of(config, seq=32)
    assert model.parameters == config.parameter_count()
    assert model.flops() == 32 * config.flops_per_token(32)


# ---- memory by formula


def test_zero_holds_what_its_paper_says():
    """Rajbhandari et al. 2020, Fig. 1: 7.5 billion parameters on 64 ranks, in 10⁹ bytes."""
    model = Model(36, 4096, 32, 51200, 2048)  # 7.5 billion, as in the figure
    published = {0: 120, 1: 31.4, 2: 16.6, 3: 1.9}
    for stage, gigabytes in published.items():
        held = plan(model, Strategy(dp=64, zero=stage, global_batch=64), A100).memory
        state = held["weights"] + held["gradients"] + held["optimizer"]
        assert state * 7.5e9 / model.parameters / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_activations_are_those_of_korthikantis_table():
    """arXiv:2205.05198, Table 2, times the layers of the first stage's p micro-batches."""
    model, b, t = MODELS["megatron-22b"], 4, 8
    s, h, a, layers = model.seq, model.hidden_size, model.heads, model.layers
    sbh = s * b * h
    table = {
        ("none", False): sbh * (10 + 24 / t + 5 * a * s / (h * t)),
        ("none", True): sbh / t * (34 + 5 * a * s / h),
        ("selective", False): sbh * (10 + 24 / t),
        ("selective", True): 34 * sbh / t,
        ("full", False): 2 * sbh,
    }
    for (mode, split), layer in table.items():
        strategy = Strategy(
            pp=4, tp=t, micro_batch=b, global_batch=64, recompute=mode, sequence_parallel=split
        )
        got = plan(model, strategy, A100).memory["activations"]
        mask = sbh / (t if split else 1) * 4  # the embedding's dropout
        assert got == pytest.approx(layers * layer + mask, rel=1e-9), mode
        more = Strategy(**{**vars(strategy), "interleave": 3})
        ratio = plan(model, more, A100).memory["activations"] / got
        assert ratio == pytest.approx(1 + 3 / (4 * 3), rel=1e-9)


def test_a_tied_matrix_is_on_both_ends():
    model = Model(8, 64, 4, 1000, 32)
    one = plan(model, Strategy(global_batch=8), A100).memory["weights"]
    assert one == 2 * model.parameters
    two = plan(model, Strategy(pp=2, global_batch=8), A100).memory["weights"]
    assert two > model.parameters


def test_schedules_hold_as_many_micro_batches_as_they_must():
    model = MODELS["megatron-39b"]

    def held(**changes):
        strategy = Strategy(pp=4, tp=8, global_batch=32, recompute="full", **changes)
        return plan(model, strategy, A100)

    usual, gpipe, less = held(), held(schedule="gpipe"), held(schedule="zero-bubble")
    assert gpipe.memory["activations"] >= 8 * usual.memory["activations"]  # 32 and 4 micro-batches
    assert less.memory["activations"] == usual.memory["activations"]
    assert less.seconds["bubble"] == pytest.approx(usual.seconds["bubble"] / 3)


def test_offload_moves_bytes_to_the_host_and_costs_time():
    model = MODELS["gpt3-13b"]
    here = plan(model, Strategy(dp=8, zero=1, global_batch=64), A100)
    away = plan(model, Strategy(dp=8, zero=1, global_batch=64, offload="optimizer"), A100)
    assert here.host == 0
    assert away.host == here.memory["optimizer"] + here.memory["gradients"]
    assert away.seconds["offload"] > 0 == here.seconds["offload"]
    streamed = plan(model, Strategy(dp=8, zero=3, global_batch=64, offload="parameters"), A100)
    assert streamed.memory["weights"] == 0 < streamed.host


# ---- time


def test_the_kinds_add_up_and_the_rates_follow():
    one = plan(MODELS["gpt3-175b"], Strategy(dp=2, pp=8, tp=8, global_batch=64), A100)
    total = one.seconds["total"]
    kinds = sum(seconds for kind, seconds in one.seconds.items() if kind != "total")
    assert total == pytest.approx(kinds)
    flops = MODELS["gpt3-175b"].flops(64)
    assert one.tflops_per_gpu == pytest.approx(flops / total / 128 / 1e12)
    assert one.mfu == pytest.approx(one.tflops_per_gpu * 1e12 / A100.peak)
    assert one.memory["total"] == pytest.approx(
        sum(size for kind, size in one.memory.items() if kind != "total")
    )


def test_the_bubble_is_that_of_the_formula():
    """(p−1)/(m·v) of a stage's working time, for equal stages."""
    model = Model(96, 12288, 96, vocab_size=64, seq=2048)  # the ends cost nearly nothing
    for v in (1, 2):
        strategy = Strategy(pp=8, tp=8, interleave=v, global_batch=64, recompute="full")
        seconds = plan(model, strategy, A100).seconds
        work = sum(seconds[kind] for kind in ("compute", "recompute", "tp", "pp"))
        assert seconds["bubble"] / work == pytest.approx(7 / (64 * v), rel=0.02)


def test_small_products_are_slower_for_each_flop():
    def rate(m, n, k):
        return 2 * m * n * k / float(kernels.matmul(A100, m, n, k)) / A100.peak

    assert 0.75 < rate(16384, 16384, 16384) < A100.sustained
    assert rate(2048, 1536, 12288) < rate(2048, 12288, 12288) < rate(8192, 12288, 12288)
    assert rate(16, 12288, 12288) < 0.1  # reading the matrix takes longer


def test_messages_go_over_the_slowest_network_that_they_cross():
    machine = Machine("two", 1e12, 1, 1, 1e9, 1e9, (Level(8, 100e9, 0), Level(ANY, 10e9, 0)),
                      1e9, 1e9, 1e9)
    used = network.LINK

    def seconds(function, n, stride):
        return function(machine, 1e9, np.array([n]), np.array([stride])).item()

    assert seconds(network.all_reduce, 8, 1) == pytest.approx(2 * 7 / 8 / (100 * used))
    # one rank per node uses its own link, eight ranks use eight links
    assert seconds(network.all_reduce, 4, 8) == pytest.approx(2 * 3 / 4 / (10 * used))
    assert seconds(network.all_reduce, 16, 1) == pytest.approx(2 * 15 / 16 / (80 * used))
    assert seconds(network.gather, 16, 4) == pytest.approx(15 / 16 / (20 * used))
    assert seconds(network.all_to_all, 8, 1) == pytest.approx(7 / 8 / (100 * used))
    assert seconds(network.all_to_all, 16, 1) == pytest.approx(8 / 16 / (10 * used))
    assert seconds(network.all_reduce, 1, 1) == 0


def test_a_ring_waits_longer_where_it_leaves_the_node():
    machine = Machine("two", 1e12, 1, 1, 1e9, 1e9, (Level(8, 1e9, 1e-6), Level(ANY, 1e9, 9e-6)),
                      1e9, 1e9, 1e9)

    def waits(n, stride):
        return network.pace(machine, np.array([n]), np.array([stride]))[1].item()

    assert waits(8, 1) == pytest.approx(1e-6)
    assert waits(8, 8) == pytest.approx(9e-6)
    assert waits(64, 1) == pytest.approx((56 * 1e-6 + 8 * 9e-6) / 64)
    assert waits(4, 4) == pytest.approx((2 * 1e-6 + 2 * 9e-6) / 4)


def test_tensor_parallelism_across_nodes_is_slow():
    def seconds(tp, pp):
        strategy = Strategy(dp=4, pp=pp, tp=tp, global_batch=256, recompute="full")
        return plan(MODELS["gpt3-175b"], strategy, A100).seconds["total"]

    assert seconds(8, 4) < seconds(16, 2) < seconds(32, 1)


# ---- overlap of communication with computation

H100 = MACHINES["dgx-h100"]
EACH = {  # flag: (a strategy that has something to hide, the kind of seconds)
    "overlap_tp": (Strategy(tp=8, dp=2, global_batch=32, sequence_parallel=True), "tp"),
    "overlap_pp": (Strategy(tp=8, pp=8, interleave=3, global_batch=32), "pp"),
    "overlap_grad_reduce": (Strategy(tp=8, pp=8, dp=4, global_batch=32), "dp"),
    "overlap_param_gather": (Strategy(tp=8, pp=8, dp=4, global_batch=32, zero=1), "dp"),
}


@pytest.mark.parametrize("flag", EACH)
def test_each_flag_hides_its_own_messages(flag):
    """Exactly the hidden seconds leave the bill; the computation stays."""
    strategy, kind = EACH[flag]
    model, nothing = MODELS["gpt3-175b"], dict.fromkeys(OVERLAPS, False)
    off = plan(model, replace(strategy, **nothing), H100)
    on = plan(model, replace(strategy, **nothing | {flag: True}), H100)
    more = on.hidden[kind] - off.hidden[kind]
    assert more > 0
    assert on.seconds[kind] + on.hidden[kind] == pytest.approx(off.seconds[kind] + off.hidden[kind])
    for other in ("compute", "recompute", "optimizer"):
        assert on.seconds[other] == off.seconds[other]
    assert on.seconds["total"] < off.seconds["total"]
    assert {other: on.hidden[other] - off.hidden[other] for other in on.hidden if other != kind} \
        == {other: 0 for other in on.hidden if other != kind}


def test_without_flags_a_machine_does_what_megatron_did_in_its_time():
    strategy = Strategy(tp=8, pp=8, dp=2, interleave=3, global_batch=32, zero=1,
                        sequence_parallel=True)
    for name, usual, attention in (("dgx-a100", False, "scores"), ("dgx-h100", True, "fused")):
        model, machine = MODELS["gpt3-175b"], MACHINES[name]
        said = replace(strategy, attention=attention, **dict.fromkeys(OVERLAPS, usual))
        assert plan(model, strategy, machine).seconds == plan(model, said, machine).seconds
        other = replace(strategy, **dict.fromkeys(OVERLAPS, not usual))
        assert plan(model, strategy, machine).seconds != plan(model, other, machine).seconds
    assert search(MODELS["gpt3-13b"], H100, 8, top=1)[0].strategy.overlap_tp is True
    found = search(MODELS["gpt3-13b"], H100, 8, top=1, overlap_tp=False)
    assert found[0].strategy.overlap_tp is False


def test_no_message_hides_longer_than_the_computation_lasts():
    """On a network a thousand times slower, the rest of every message is exposed."""
    slow = replace(H100, levels=tuple(
        replace(level, bandwidth=level.bandwidth / 1000) for level in H100.levels))
    for strategy in (
        Strategy(tp=8, pp=4, dp=2, interleave=2, global_batch=16, zero=1, sequence_parallel=True),
        Strategy(dp=64, zero=3, global_batch=64),
    ):
        one = plan(MODELS["gpt3-13b"], strategy, slow)
        work = one.seconds["compute"]
        assert all(0 <= seconds <= work * (1 + 1e-9) for seconds in one.hidden.values())
        assert one.seconds["dp"] > one.hidden["dp"]


def test_tensor_parallelism_in_fast_nodes_can_hide_all_of_its_messages():
    strategy = Strategy(tp=8, global_batch=32, sequence_parallel=True, micro_batch=4)
    one = plan(MODELS["gpt3-175b"], strategy, H100)
    assert one.hidden["tp"] > 20 * one.seconds["tp"]
    # not across nodes
    assert all(found.strategy.tp <= 8 for found in search(MODELS["gpt3-175b"], H100, 1024, top=5))


def test_eight_bits_speed_up_the_products_of_layers_alone():
    model = MODELS["gpt3-175b"]
    strategy = Strategy(tp=8, pp=8, global_batch=32, attention="fused")
    wide, narrow = (plan(model, replace(strategy, precision=precision), H100)
                    for precision in ("bf16", "fp8"))
    ratio = H100.fp8_peak * H100.fp8_sustained / H100.peak / H100.sustained
    assert 1.4 < wide.seconds["compute"] / narrow.seconds["compute"] < ratio
    assert narrow.memory == wide.memory
    assert narrow.seconds["tp"] + narrow.hidden["tp"] == pytest.approx(
        wide.seconds["tp"] + wide.hidden["tp"]
    )


# ---- context parallelism

EIGHT = replace(MODELS["llama3-8b"], seq=131072)


def shared(cp, **changes):
    strategy = Strategy(**{"tp": 2, "cp": cp, "global_batch": 1, "recompute": "full"} | changes)
    return plan(EIGHT, strategy, H100)


def test_the_ways_are_those_of_the_trainer():
    assert set(CONTEXT) == set(WAYS)


def test_ranks_of_cp_share_out_the_tokens_and_the_state():
    one, four, data = shared(1), shared(4, zero=1), shared(1, dp=4, zero=1, global_batch=4)
    assert four.memory["activations"] == one.memory["activations"] / 4
    for kind in ("weights", "gradients", "optimizer"):
        assert four.memory[kind] == data.memory[kind]
    assert four.seconds["optimizer"] == data.seconds["optimizer"]
    sums = [each.seconds["dp"] + each.hidden["dp"] for each in (four, data)]
    assert sums[0] == sums[1] > 0  # gradients are summed over all ranks with the same parameters
    assert four.seconds["compute"] == pytest.approx(one.seconds["compute"] / 4, rel=0.02)
    assert four.strategy.gpus == 8 and four.tokens_per_second > 3.8 * one.tokens_per_second


def test_one_rank_of_cp_is_as_without():
    for way in CONTEXT:
        assert shared(1, context=way).seconds == shared(1).seconds
        assert shared(1, context=way).memory == shared(1).memory
    assert shared(1).seconds["cp"] == shared(1).hidden["cp"] == 0


def test_a_ring_hides_as_long_as_a_block_takes():
    """32 times the sequence: 32 times the bytes, except for latency, and 1,024 times the scores."""
    model = replace(EIGHT, heads=32, kv_heads=32)

    def exposed(seq):
        strategy = Strategy(tp=8, cp=8, global_batch=1)
        return plan(replace(model, seq=seq), strategy, H100)

    short, long = exposed(16384), exposed(524288)
    sent = [one.seconds["cp"] + one.hidden["cp"] for one in (short, long)]
    assert sent[1] == pytest.approx(32 * sent[0], rel=0.1)
    assert short.seconds["cp"] > short.hidden["cp"]
    assert long.hidden["cp"] > 8 * long.seconds["cp"]  # the last gradients cannot hide
    for way in ("ulysses", "gather"):
        strategy = Strategy(tp=4, cp=8, global_batch=1, context=way)
        one = plan(replace(model, seq=524288), strategy, H100)
        assert one.hidden["cp"] == 0 < one.seconds["cp"]


def test_each_way_has_its_own_memory():
    """`gather` buffers the keys and values of all ranks; `ulysses` keeps the result twice."""
    held = {way: shared(8, context=way, recompute="none").memory for way in CONTEXT}
    assert held["ulysses"]["activations"] > held["ring"]["activations"]
    assert held["gather"]["activations"] == held["ring"]["activations"]
    wide = replace(EIGHT, kv_heads=32, vocab_size=256)
    ring, gather = (
        plan(wide, Strategy(cp=16, global_batch=1, recompute="full", context=way), H100).memory
        for way in ("ring", "gather")
    )
    assert gather["buffers"] > 2 * ring["buffers"]


def test_cp_stands_between_tp_and_dp():
    """Its messages leave the node when tp · cp exceeds it."""
    inside, outside = (shared(4, tp=tp, context="gather").seconds["cp"] for tp in (2, 4))
    assert outside > 2 * inside
    here, there = (shared(cp, dp=8, zero=1, global_batch=8, tp=1) for cp in (1, 4))
    assert there.seconds["dp"] + there.hidden["dp"] > here.seconds["dp"] + here.hidden["dp"]


def test_a_long_sequence_asks_for_cp():
    """131,072 tokens and few rows: more ranks than rows and than a node has for tp."""
    best = search(EIGHT, H100, 64, 4, top=1)[0]
    assert best.strategy.cp > 1 and best.fits
    without = search(EIGHT, H100, 64, 4, top=1, cp=1)[0]
    assert best.seconds["total"] < 0.9 * without.seconds["total"]
    fixed = search(EIGHT, H100, 64, 4, top=5, cp=4, context="ulysses")
    assert {(one.strategy.cp, one.strategy.context) for one in fixed} == {(4, "ulysses")}


def test_a_search_shares_out_long_sequences_only():
    tried = set(candidates(EIGHT, H100, 64, 16).cp)
    assert tried == {1, 2, 4, 8, 16, 32}
    assert TOKENS == 131072 // 32
    assert set(candidates(MODELS["llama2-70b"], H100, 64).cp) == {1}
    assert set(candidates(MODELS["llama2-70b"], H100, 64, cp=(1, 2)).cp) == {1, 2}


# ---- search


def test_the_search_agrees_with_the_plan_of_each_strategy():
    model = MODELS["megatron-18b"]
    for one in search(model, A100, 64, top=5):
        again = plan(model, one.strategy, A100)
        assert again.seconds == pytest.approx(one.seconds)
        assert again.memory == pytest.approx(one.memory)
        assert one.fits and one.strategy.gpus == 64


def test_the_search_is_ranked_and_keeps_what_is_fixed():
    found = search(MODELS["gpt3-175b"], A100, 1024, recompute="full", tp=(4, 8), top=30)
    times = [one.seconds["total"] for one in found]
    assert times == sorted(times) and len(found) == 30
    assert {one.strategy.recompute for one in found} == {"full"}
    assert {one.strategy.tp for one in found} <= {4, 8}


def test_nothing_fits_is_an_empty_list():
    assert search(MODELS["1t"], A100, 8) == []
    assert search(MODELS["1t"], A100, 8, any_memory=True, top=1)[0].fits is False


def test_all_candidates_are_different_and_valid():
    c = candidates(MODELS["mixtral-8x7b"], MACHINES["dgx-h100"], 64)
    chosen = c.take(np.arange(0, len(c), 97)).strategies()
    assert len(set(chosen)) == len(chosen) > 50
    for strategy in chosen:
        plan(MODELS["mixtral-8x7b"], strategy, MACHINES["dgx-h100"])


def test_a_search_over_a_prime_number_of_devices_ends():
    prime = 1_000_000_007
    assert len(candidates(MODELS["gpt2"], A100, prime)) == 0
    assert {one.strategy.dp for one in search(MODELS["gpt2"], A100, prime, prime)} == {prime}


def test_products_beyond_64_bits_do_not_wrap():
    most = 2**31 - 1
    model = Model(most, 2**30, 2**10, most, most, intermediate_size=most, gated=True)
    planned = plan(model, Strategy(dp=2, zero=3, global_batch=2**30), A100)
    assert planned.memory["optimizer"] == pytest.approx(12 * model.parameters / 2)
    assert min(*planned.memory.values(), *planned.seconds.values()) >= 0
    assert planned.mfu < 1


def test_arrays_and_single_strategies_are_the_same():
    model = MODELS["gpt3-13b"]
    strategies = [Strategy(tp=t, dp=8 // t, global_batch=64) for t in (1, 2, 4, 8)]
    c = Columns.of(strategies, model, A100)
    assert [strategy.tp for strategy in c.strategies()] == [1, 2, 4, 8]
    assert c.micro_batches.tolist() == [8, 16, 32, 64]


# ---- the command

SIZES = "--layers 96 --hidden 12288 --heads 96 --vocab 51200 --seq 2048"
RUN = (
    "--tp 8 --pp 8 --dp 24 --interleave 2 --micro-batch 1 --global-batch 2304 --recompute full "
    "--machine dgx-a100 --gpus 1536"
)


def asked(line, capsys):
    status = command.main(line.split())
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_prints_one_object(capsys):
    status, out, _ = asked(f"{SIZES} {RUN} --json", capsys)
    found = json.loads(out)
    assert status == 0
    assert found["parameters"] == MODELS["gpt3-175b"].parameters
    assert set(found["memory_bytes"]) == {
        "weights", "gradients", "optimizer", "activations", "buffers", "total"
    }
    assert found["fits"] is True
    for name in ("tflops_per_gpu", "hardware_tflops_per_gpu", "mfu"):
        assert math.isfinite(found[name]) and found[name] > 0
    assert found["hardware_tflops_per_gpu"] / found["tflops_per_gpu"] == pytest.approx(1.33, 0.01)
    assert found["step_seconds"]["total"] > 0


def test_the_command_prints_a_table_and_a_ranking(capsys):
    status, out, _ = asked("--model gpt3-175b --gpus 1024 --tp 8 --pp 8", capsys)
    assert status == 0 and "memory per rank" in out and "dp 16" in out
    status, out, _ = asked("--model gpt3-13b --gpus 64 --top 3 --machine dgx-h100", capsys)
    assert status == 0 and len(out.strip().splitlines()) == 3 + 4
    status, out, _ = asked("--model gpt3-13b --gpus 64 --top 3 --json", capsys)
    assert len(json.loads(out)["ranking"]) == 3
    status, out, _ = asked("--model 1t --gpus 8", capsys)
    assert status == 0 and "none of" in out


def test_the_command_takes_what_overlaps(capsys):
    line = "--model gpt3-175b --machine h100 --tp 8 --pp 8 --dp 2 --sequence-parallel --json"

    def found(flags):
        return json.loads(asked(f"{line} {flags}", capsys)[1])

    usual, off = found(""), found(" ".join(f"--no-{name.replace('_', '-')}" for name in OVERLAPS))
    assert usual["hidden_seconds"]["tp"] > off["hidden_seconds"]["tp"]
    assert off["hidden_seconds"]["pp"] == off["hidden_seconds"]["dp"] == 0
    assert off["strategy"]["overlap_tp"] is False
    on = found(" ".join(f"--{name.replace('_', '-')}" for name in OVERLAPS))
    assert on["step_seconds"] == usual["step_seconds"]
    status, out, _ = asked(line.removesuffix(" --json"), capsys)
    assert status == 0 and "hidden behind computation, in seconds: tp" in out


def test_part_of_a_name_is_enough(capsys):
    _, out, _ = asked("--model 405B --machine h100 --tp 8 --pp 16 --dp 8 --json", capsys)
    found = json.loads(out)
    assert (found["model"], found["machine"]) == ("llama3-405b", "dgx-h100")


def test_experts_talk_in_every_layer(capsys):
    line = "--model mixtral-8x7b --machine dgx-h100 --dp 16 --ep {} --zero 1 --json"
    whole, split = (json.loads(asked(line.format(ep), capsys)[1]) for ep in (1, 8))
    assert whole["step_seconds"]["ep"] == 0 < split["step_seconds"]["ep"]
    assert split["memory_bytes"]["weights"] < 0.2 * whole["memory_bytes"]["weights"]
    assert split["active_parameters"] < 0.3 * split["parameters"]


def test_the_command_takes_cp(capsys):
    line = "--model llama3-8b --seq 65536 --machine h100 --gpus 16 --tp 2 --cp 4 --global-batch 8"
    status, out, _ = asked(f"{line} --recompute full", capsys)
    assert status == 0 and "tp 2 · cp 4, ring · pp 1 · dp 2" in out
    found = json.loads(asked(f"{line} --context ulysses --json", capsys)[1])
    assert (found["strategy"]["cp"], found["strategy"]["context"]) == (4, "ulysses")
    assert found["step_seconds"]["cp"] > 0 == found["hidden_seconds"]["cp"]


def test_ffn_means_a_gated_mlp(capsys):
    line = "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256"
    _, out, _ = asked(f"{line} --seq 8192 --dp 8 --zero 3 --global-batch 8 --json", capsys)
    assert json.loads(out)["parameters"] == MODELS["llama3-8b"].parameters


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{SIZES} {RUN.replace('1536', '1024')}", "gpus 1024 is not dp·tp·pp = 24·8·8 = 1536"),
        (f"{SIZES} --tp 7", "tp 7 does not divide the 96 heads"),
        (f"{SIZES} --tp 8 --pp 200", "some stage would be empty"),
        (f"{SIZES} --dp 3 --global-batch 16", "not a multiple of dp · micro-batch"),
        (f"{SIZES} --pp 8 --interleave 2 --global-batch 12", "in multiples of pp 8"),
        (f"{SIZES} --pp 8 --zero 3", "cannot be combined with pp 8"),
        (f"{SIZES} --dp 2 --sequence-parallel", "tp is 1"),
        (f"{SIZES} --ep 2 --dp 2", "the model is dense"),
        (f"{SIZES} --tp 0", "tp 0 is not an integer above 0"),
        (f"{SIZES} --dp {2**31}", "dp 2147483648 is more than 2147483647"),
        (f"{SIZES} --gpus 8 --hidden {2**63}", "hidden 9223372036854775808 is more than"),
        (f"{SIZES} --gpus {10**12}", "gpus 1000000000000 is more than"),
        (f"{SIZES} --gpus 8 --top {10**30}", "is more than"),
        (f"{SIZES} --tp x", "invalid int value"),
        (f"{SIZES} --tp 8 --recompute some", "recompute 'some' is not one of none, selective"),
        (f"{SIZES} --machine abacus --tp 8", "machine 'abacus' is not one of"),
        ("--layers 2 --hidden 10 --heads 3 --tp 1", "heads 3 do not divide hidden 10"),
        ("--model gpt9 --gpus 8", "model 'gpt9' is not one of"),
        ("--gpus 8", "no model: give --model or --layers, --hidden, --heads"),
        ("--model gpt2", "no strategy and no devices"),
        (f"{SIZES} --tp 8 --precision fp8", "precision fp8: dgx-a100 has no fp8"),
        (f"{SIZES} --cp 4096", "cp 4096 is more than the 2048 positions of a sequence"),
        (f"{SIZES} --cp 2", "attention scores keeps whole rows: choose attention fused"),
        ("--model llama3-8b --tp 8 --cp 8 --context ulysses", "32 / tp 8, but cp 8 is more"),
        ("--model llama3-8b --cp 2 --context rings", "context 'rings' is not one of ring, ulysses"),
        ("--model llama3-8b --gpus 12 --tp 2 --cp 4", "not a multiple of tp · cp · pp = 8"),
        ("--model llama3-8b --gpus 12 --tp 2 --cp 4 --dp 2", "is not dp·tp·cp·pp = 2·2·4·1 = 16"),
        ("--model llama3-8b --gpus 1000000", "gpus 1000000: no tp · cp · pp · dp of this"),
        ("--errors --json", "--json cannot be combined with --errors"),
        ("--model gpt2 --gpus 12 --tp 5", "gpus 12 is not a multiple of tp · pp = 5"),
    ],
)
def test_sizes_that_do_not_go_together_end_with_one_sentence(line, words, capsys):
    try:
        status = command.main(line.split())
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert words in err and err.count("\n") == 1
