"""Memory of a data-parallel rank: the paper's figures, hand counts, and what autograd keeps."""

import pytest
import torch

from utils.choices import RECOMPUTE, ZERO
from utils.measure import timing
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.planner import memory
from utils.planner.strategy import OFFLOAD

BILLION = 10**9


@pytest.mark.parametrize("stage, expected", [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_figures_of_the_paper(stage, expected):
    """Rajbhandari et al. 2020, Figure 1: 7.5 billion parameters on 64 ranks, in GB."""
    held = memory.bytes_per_rank(75 * BILLION // 10, 64, stage=stage)
    assert round(sum(held.values()) / BILLION, 1) == expected


def test_kinds_and_stages_by_hand():
    held = memory.bytes_per_rank(1000, 4, stage=1, precision="fp32")
    expected = {"parameters": 4000, "gradients": 4000, "optimizer": 2000, "temporary": 0}
    assert held == expected
    held = memory.bytes_per_rank(1001, 4, stage=3, precision="bf16", unit=100)
    expected = {"parameters": 502, "gradients": 502, "optimizer": 3012, "temporary": 400}
    assert held == expected
    plain = memory.bytes_per_rank(1000, 4, precision="fp32", optimizer="sgd")
    assert sum(plain.values()) == 8000


def test_one_rank_holds_everything_at_every_stage():
    for stage in ZERO:
        assert sum(memory.bytes_per_rank(12345, 1, stage=stage).values()) == 16 * 12345


def test_offloading_moves_and_loses_nothing():
    for stage in ZERO:
        whole = memory.bytes_per_rank(5000, 2, stage=stage)
        for offload in OFFLOAD:
            there = memory.place(5000, 2, stage=stage, offload=offload)
            assert {k: there.device[k] + there.host[k] for k in whole} == whole
    there = memory.place(5000, 2, stage=2, offload="optimizer")
    assert sum(there.device.values()) == 2 * 5000  # only the weights are left
    assert sum(memory.place(5000, offload="parameters").device.values()) == 0


def test_errors_name_the_value():
    with pytest.raises(ValueError, match="stage 4 is not one of 0, 1, 2, 3"):
        memory.place(10, stage=4)
    with pytest.raises(ValueError, match="precision 'int8'"):
        memory.place(10, precision="int8")
    with pytest.raises(ValueError, match="offload 'disk'"):
        memory.place(10, offload="disk")
    with pytest.raises(ValueError, match="10 parameters on 0 ranks"):
        memory.place(10, 0)
    with pytest.raises(ValueError, match="recompute 'some'"):
        memory.activation_bytes(GPTConfig(), 1, 1, "some")


def test_bytes_sent():
    sent = [memory.sent_per_step(1000, 4, stage=stage) for stage in ZERO]
    assert sent == [6000, 6000, 6000, 9000]
    assert memory.sent_per_step(1000, 1, stage=3) == 0


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(hidden_size=64, layers=2, heads=4),
        GPTConfig(hidden_size=64, layers=3, heads=4, kv_heads=2, head_dim=24),
        GPTConfig(hidden_size=32, layers=1, heads=2, intermediate_size=48, vocab_size=300),
    ],
    ids=["plain", "grouped heads", "one layer"],
)
@pytest.mark.parametrize("batch, seq", [(2, 32), (5, 16)])
def test_activations_are_what_autograd_keeps(config, batch, seq):
    model = GPT(config)
    x = torch.zeros(batch, seq, dtype=torch.long)
    y = torch.zeros(batch, seq, dtype=torch.long)
    kept = timing.saved_bytes(
        lambda: cross_entropy(model(x), y), besides=[*model.parameters(), x, y]
    )
    computed = memory.activation_bytes(config, batch, seq, value_bytes=4)
    assert computed == pytest.approx(kept, rel=0.01)


def test_recomputation_keeps_less():
    config = GPTConfig(hidden_size=128, layers=12, heads=4)
    none, selective, full = (memory.activation_bytes(config, 4, 128, kind) for kind in RECOMPUTE)
    assert none > selective > full > 0
    deeper = memory.activation_bytes(GPTConfig(layers=13), 4, 128, "full")
    assert deeper - full == 2 * 4 * 128 * 128  # one more block's input


def test_a_block_of_gpt_3():
    assert memory.unit_parameters(175 * BILLION) == pytest.approx(12 * 12288**2, rel=0.01)
    assert memory.unit_parameters(1) == 1


def test_the_largest_model():
    """80 GB: 16 bytes per parameter on one rank, 16/64 on each of 64."""
    alone = memory.largest_model(80 * BILLION, blocks=False)
    assert alone == pytest.approx(5 * BILLION, rel=1e-3)
    shared = memory.largest_model(80 * BILLION, 64, stage=3, blocks=False)
    assert shared == pytest.approx(320 * BILLION, rel=1e-3)
    assert memory.largest_model(80 * BILLION, 64, stage=3) < shared
    assert memory.largest_model(80 * BILLION, reserve=40 * BILLION) < 0.51 * alone
    assert memory.largest_model(10, reserve=10) == 0


def test_the_host_is_a_limit_too():
    how = {"offload": "parameters", "blocks": False}
    assert memory.largest_model(BILLION, host_bytes=16 * BILLION, **how) == pytest.approx(
        BILLION, rel=1e-3
    )
    assert memory.largest_model(BILLION, **how) > 10**17  # nothing bounds it
