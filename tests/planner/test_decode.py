"""Predicted seconds of decoding: known sums, published measurements, real links."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from utils.models.config import GPTConfig
from utils.models.tp_plan import rank_shapes
from utils.planner import MACHINES, MODELS, Model, network
from utils.planner.decode import (
    KINDS,
    OPERATORS,
    all_reduce_link,
    decode_step,
    here,
    over,
    prefill,
    published,
    where_it_pays,
)
from utils.planner.kernels import STREAM
from utils.ranks import Ranks
from utils.serving.engine.model import ServedDecoder

A100 = MACHINES["dgx-a100"]
SMALL = Model(
    5, 128, 2, vocab_size=4096, seq=512, intermediate_size=344, gated=True, tie_embeddings=True
)


def test_weights_are_read_once_whatever_the_batch():
    model = MODELS["llama2-13b"]
    matrices = model.layers * (model.attention_matrices + model.expert_matrices)
    size = 2 * (matrices + model.vocab_size * model.hidden_size)
    one, many = (decode_step(model, A100, batch, context=100) for batch in (1, 32))
    assert one.seconds["weights"] == pytest.approx(size / (A100.bandwidth * STREAM))
    assert many.seconds["weights"] == one.seconds["weights"]
    assert many.seconds["cache"] == pytest.approx(32 * one.seconds["cache"])
    assert many.tokens == 32
    assert many.tokens_per_second > 20 * one.tokens_per_second
    assert one.total == sum(one.seconds[kind] for kind in KINDS)


def test_large_batches_compute():
    model = MODELS["llama2-13b"]
    flops = 2 * 2048 * (model.layers * (model.attention_matrices + model.expert_matrices))
    flops += 2 * 2048 * model.vocab_size * model.hidden_size
    step = decode_step(model, A100, 2048, context=1)
    assert step.seconds["weights"] == pytest.approx(flops / (A100.peak * A100.sustained))


def test_cache_is_keys_and_values_of_every_position():
    model = MODELS["llama3-8b"]  # 8 key-value heads of 128
    step = decode_step(model, A100, batch=3, context=1000)
    size = 2 * model.layers * 8 * 128 * 2 * 3 * 1000
    assert step.seconds["cache"] == pytest.approx(size / (A100.bandwidth * STREAM))
    halves = decode_step(model, A100, batch=3, context=1000, tp=2)
    assert halves.seconds["cache"] == pytest.approx(step.seconds["cache"] / 2)
    # 16 ranks and 8 heads: each rank has one whole head, not half of one
    few, many = (decode_step(model, A100, 3, 1000, tp) for tp in (8, 16))
    assert few.seconds["cache"] == many.seconds["cache"]


def test_messages_are_two_sums_a_layer_one_more_and_the_logits():
    batch, tp = 4, 4
    step = decode_step(SMALL_4, A100, batch, tp=tp)
    count, hidden, logits = 2 * 5 + 1, 2 * batch * 128, 2 * batch * 4096
    together = count * network.all_reduce(A100, hidden, tp, 1)
    together += network.gather(A100, logits, tp, 1)
    assert step.seconds["latency"] + step.seconds["bytes"] == pytest.approx(float(together))
    alone = decode_step(SMALL_4, A100, batch)
    assert alone.seconds["latency"] == alone.seconds["bytes"] == alone.communication == 0


SMALL_4 = replace(SMALL, heads=4)


def test_measured_links_take_the_place_of_networks():
    class Link:
        alpha, beta = 1e-3, 1e-9

    step = decode_step(SMALL, MACHINES["laptop"], 8, tp=2, links={2: Link})
    assert step.seconds["latency"] == pytest.approx((2 * 5 + 1 + 1) * 1e-3)
    assert step.seconds["bytes"] == pytest.approx(
        1e-9 * 4 * 8 * (11 * 128 + 4096 / 2)  # fp32 on a CPU
    )
    with pytest.raises(ValueError, match="tp 2 has no measured link, only \\[4\\]"):
        decode_step(SMALL, MACHINES["laptop"], tp=2, links={4: Link})


def test_prefill_computes_where_decoding_reads():
    model = MODELS["llama2-13b"]
    first = prefill(model, A100, tokens=2000, batch=4)
    step = decode_step(model, A100, batch=4, context=1000)
    assert first.tokens == step.tokens == 4
    assert first.total > 30 * step.total
    rows = 8000 * 2 * model.layers * (model.attention_matrices + model.expert_matrices)
    assert first.seconds["weights"] == pytest.approx(rows / (A100.peak * A100.sustained), rel=0.01)
    longer = prefill(model, A100, tokens=4000, batch=4)
    assert longer.seconds["cache"] == pytest.approx(4 * first.seconds["cache"])  # T² scores


def test_predictions_hold_against_published_measurements():
    """gpt-fast on A100s: 7B and 70B, 1 to 8 GPUs."""
    table = published()
    assert len(table) == 7
    assert table["error"].abs().max() < 0.2
    assert table["error"].abs().median() < 0.05
    for _, rows in table.groupby("model"):
        assert rows["predicted"].is_monotonic_increasing


def test_experts_that_a_batch_meets():
    model = MODELS["mixtral-8x7b"]
    two, all_of_them = (decode_step(model, A100, batch, 1) for batch in (1, 64))
    few = 2 * model.expert_matrices + model.attention_matrices
    many = 8 * model.expert_matrices + model.attention_matrices
    head = model.vocab_size * model.hidden_size
    ratio = (32 * many + head) / (32 * few + head)
    assert all_of_them.seconds["weights"] / two.seconds["weights"] == pytest.approx(ratio)


def test_table_and_words():
    model = MODELS["llama3-70b"]
    table = over(model, A100, batches=(1, 16), tps=(1, 2, 4))
    assert table[["tp", "batch"]].to_numpy().tolist() == [
        [tp, batch] for tp in (1, 2, 4) for batch in (1, 16)
    ]
    assert table["fits"].tolist() == [False, False, True, True, True, True]  # 141 GB of weights
    assert (table["tokens_per_second"] / table["tp"]).tolist() == table["per_device"].tolist()
    text = where_it_pays(model, A100, batches=(1, 16))
    assert len(text.splitlines()) == 2
    assert "batch 16: fastest with tp 4" in text
    assert "tp 1" not in text
    alone = where_it_pays(model, A100, batches=(1,), tps=(1,))
    assert alone == "batch 1: fits on none of tp 1"


def test_slow_links_make_parallel_ranks_slower():
    """On a laptop, reading a small model takes less time than one all-reduce."""
    laptop = MACHINES["laptop"]
    steps = [decode_step(SMALL, laptop, tp=tp) for tp in (1, 2)]
    assert steps[1].total > steps[0].total
    assert steps[1].communication > 0.5


class Count(TorchDispatchMode):
    """Count the operators that torch dispatches."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_operators_of_a_layer_are_counted(one_thread):
    """The difference between decoders of 2 and 5 layers, for a batch and for one row."""
    found = []
    for layers in (2, 5):
        config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32,
                  "num_hidden_layers": layers,
                  "num_attention_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-5,
                  "max_position_embeddings": 32, "tie_word_embeddings": True}
        model = GPTConfig.from_hf(config)
        weights = {name: torch.randn(shape) for name, shape in
                   rank_shapes(model, 0, 1).items()}
        decoder = ServedDecoder(model, weights, 0, 1, max_num_seqs=4, max_model_len=32)
        decoder.prefill(0, 0, [1, 2, 3])
        for slots in ([0], [0, 1, 2, 3]):
            with Count() as counter:
                decoder.decode(slots, [5] * len(slots))
            found.append(counter.count)
    one, many = (found[2] - found[0]) / 3, (found[3] - found[1]) / 3
    assert one == pytest.approx(OPERATORS, abs=5)
    assert many == pytest.approx(OPERATORS, abs=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 3}, "tp 3 does not divide the 2 heads"),
        ({"tp": 0}, "tp 0 is not an integer"),
        ({"batch": 0}, "batch 0 is not"),
        ({"batch": 1.5}, "batch 1.5 is not"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        decode_step(SMALL, A100, **changes)


def test_this_machine_is_measured_on_real_ranks():
    with Ranks(2) as ranks:
        machines, links = here(ranks, SMALL, tps=(1, 2))
        again = all_reduce_link(ranks, values=(256, 4096), repeats=3)
        with pytest.raises(ValueError, match="tp 4 of 2 ranks"):
            here(ranks, SMALL, tps=(4,))
        with pytest.raises(ValueError, match="among 4 of 2 ranks"):
            all_reduce_link(ranks, 4)
    assert sorted(machines) == [1, 2]
    assert sorted(links) == [2]
    assert again.sizes == (1024, 16384)
    assert min(again.times) > 0
    for machine in machines.values():
        assert machine.bandwidth > 1e8
        assert machine.peak > 1e8
        assert 0 < machine.launch < 0.1
    table = over(SMALL, machines, batches=(1, 4), tps=(1, 2), links=links)
    assert (table["step"] > 0).all()
    assert table["launch"].tolist() == [
        SMALL.layers * OPERATORS * machines[tp].launch for tp in (1, 1, 2, 2)
    ]
    assert (table["latency"] > 0).tolist() == [False, False, links[2].alpha > 0, links[2].alpha > 0]
    with pytest.raises(ValueError, match="tp 4 is not among the measured ones, \\[1, 2\\]"):
        decode_step(SMALL_4, machines, tp=4, links=links)
