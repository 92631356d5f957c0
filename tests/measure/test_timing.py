"""Counts are exact; times satisfy relations that hold on any machine."""

import itertools
import time

import pytest
import torch

from utils.measure import timing
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.ranks import Ranks


def test_seconds_is_near_what_a_sleep_takes():
    assert 0.02 <= timing.seconds(lambda: time.sleep(0.02), repeats=3) < 0.5


def test_seconds_of_something_short_is_more_than_nothing():
    assert 0 < timing.seconds(lambda: None) < 1e-3


def test_in_turn_calls_each_after_the_other_and_keeps_its_least(monkeypatch):
    monkeypatch.setattr(timing, "_time", lambda function, *_: function())
    called, naps = [], {"a": [1, 9, 4], "b": [2, 6, 8]}  # the first of each is discarded

    def nap(name):
        called.append(name)
        return naps[name].pop(0)

    least = timing.in_turn({name: lambda name=name: nap(name) for name in naps}, rounds=2)
    assert called == ["a", "b"] * 3 and least == {"a": 4, "b": 6}
    with pytest.raises(ValueError, match="rounds 0 measures nothing"):
        timing.in_turn({}, rounds=0)


def test_a_loop_is_watched_while_it_works_and_while_it_waits():
    def slow():
        for item in "ab":
            time.sleep(0.02)
            yield item
        time.sleep(0.03)  # work after the last item

    log, seen = [], []
    for item in timing.watched(slow(), log):
        seen.append(item)
        time.sleep(0.04)
    assert seen == ["a", "b"]
    assert [what for what, *_ in log] == ["wait", "work", "wait", "work", "wait"]
    least = (0.02, 0.04, 0.02, 0.04, 0.03)
    assert all(end - begin >= seconds for (_, begin, end), seconds in zip(log, least))
    assert all(before[2] <= after[1] for before, after in itertools.pairwise(log))


def test_nothing_to_watch_is_one_wait():
    log = []
    assert list(timing.watched([], log)) == []
    assert [what for what, *_ in log] == ["wait"]


def test_seconds_refuses_zero_repeats():
    with pytest.raises(ValueError, match="repeats 0 measures nothing"):
        timing.seconds(lambda: None, repeats=0)


def test_a_matrix_product_has_more_flops_a_second_than_a_copy_has_numbers():
    """A product reuses each element in `size` multiplications."""
    numbers = min(timing.memory_bandwidth(size=2**26, repeats=1) for _ in range(3)) / 4
    assert max(timing.matmul_flops(512, repeats=1) for _ in range(5)) > numbers


def test_flops_of_a_matrix_product_are_two_per_multiply_and_add():
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    assert timing.flops(lambda: a @ b) == 2 * 3 * 5 * 7


def test_flops_count_the_backward_pass_and_attention():
    tiny = GPTConfig(hidden_size=16, layers=2, heads=2)
    model, tokens = GPT(tiny), torch.zeros(2, 8, dtype=torch.long)

    def step():
        cross_entropy(model(tokens), tokens).backward()

    forward = timing.flops(lambda: model(tokens))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2)
    matrices -= 0 if tiny.tie_embeddings else model.model.embed_tokens.weight.numel()
    attention = 2 * 2 * 8 * 16 * tiny.layers  # q·k and p·v, per token
    assert forward == 2 * 8 * (2 * matrices + attention)
    assert timing.flops(step) == 3 * forward


def test_saved_bytes_of_a_linear_layer_are_its_input():
    layer, x = torch.nn.Linear(4, 6), torch.randn(3, 4)
    assert timing.saved_bytes(lambda: layer(x), besides=layer.parameters()) == 3 * 4 * 4
    assert timing.saved_bytes(lambda: layer(x), besides=[x, *layer.parameters()]) == 0


def test_saved_bytes_count_a_tensor_once():
    x = torch.randn(10, requires_grad=True)
    hidden = x.exp()
    assert timing.saved_bytes(lambda: hidden * hidden + hidden * hidden) == 10 * 4


def test_alpha_beta_recovers_the_line():
    sizes = [4, 1e3, 1e6]
    alpha, beta = timing.alpha_beta(sizes, [3e-5 + 2e-9 * size for size in sizes])
    assert alpha == pytest.approx(3e-5) and beta == pytest.approx(2e-9)


def test_alpha_beta_is_never_negative():
    assert timing.alpha_beta([100, 200], [1e-3, 3e-3])[0] == 0
    assert timing.alpha_beta([100, 200], [3e-3, 1e-3])[1] == 0


@pytest.mark.parametrize("sizes, times", [([4], [1.0]), ([4, 8], [1.0]), ([4, 8], [0.0, 1.0])])
def test_alpha_beta_says_what_it_needs(sizes, times):
    with pytest.raises(ValueError, match="two or more sizes"):
        timing.alpha_beta(sizes, times)


def test_a_link_between_two_of_three_ranks_has_a_latency_and_a_bandwidth():
    with Ranks(3) as ranks:
        link = timing.link(ranks, sizes=(4, 2**16, 2**24), repeats=9)
    assert link.alpha >= 0 and link.beta > 0
    assert link.times[-1] > link.times[0]
    assert link(2**23) > link(2**22) > link.alpha
    with Ranks(1) as ranks, pytest.raises(ValueError, match="a link joins two ranks"):
        timing.link(ranks)
