"""The n-gram model: equal to a slow one made of dictionaries, normalized, and its stored form."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from models.build.ngram import NGram, largest

TOKENS = np.random.default_rng(0).zipf(1.6, 3000) % 7


def slow(tokens, order, vocabulary, discounts):
    """The same model by its formula, one n-gram at a time; returns p(word, history)."""
    tables, table = (
        [],
        Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)),
    )
    for _ in range(order):
        tables.insert(0, table)
        table = Counter(gram[1:] for gram in table)
    followers = []
    for table in tables:
        by_context = defaultdict(dict)
        for gram, count in table.items():
            by_context[gram[:-1]][gram[-1]] = count
        followers.append(by_context)

    def probability(word, history):
        result = 1 / vocabulary
        for n in range(1, order + 1):
            if len(history) < n - 1:
                break
            after = followers[n - 1].get(tuple(history[len(history) - n + 1 :]))
            if after is None:
                continue
            taken = {w: discounts[n - 1][min(c, 3)] for w, c in after.items()}
            kept = after.get(word, 0) - taken.get(word, 0)
            result = (kept + sum(taken.values()) * result) / sum(after.values())
        return result

    return probability


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_equals_the_formula_and_sums_to_one(order):
    train, held_out = TOKENS[:2500].tolist(), TOKENS[2500:2600].tolist()
    model = NGram.fit(train, order, vocabulary=8)
    expected = slow(train, order, 8, [level.discounts for level in model.levels])
    ours = model.probabilities(held_out)
    for position, word in enumerate(held_out):
        assert ours[position] == pytest.approx(expected(word, held_out[:position]), rel=1e-12)
    for history in ([], [3], [1, 2], [0, 0, 0], [7, 7, 7]):  # token 7 never occurred
        total = sum(model.probabilities([*history, word])[-1] for word in range(8))
        assert total == pytest.approx(1.0, rel=1e-12)


def test_it_predicts_better_with_a_longer_history():
    rng = np.random.default_rng(1)
    words = [rng.integers(0, 20, 5) for _ in range(6)]
    tokens = np.concatenate([words[i] for i in rng.integers(0, 6, 800)])
    bits = [NGram.fit(tokens[:3000], n, 20).bits(tokens[3000:]).mean() for n in (1, 2, 3)]
    assert bits[0] > bits[1] + 0.5 > bits[2] + 0.5
    assert bits[2] > np.log2(6) / 5  # not below its entropy


def test_stored():
    model = NGram.fit(np.concatenate((TOKENS, np.zeros(400, dtype=int))), 3, 8)
    assert model.levels[-1].counts.max() > 255  # a count that does not fit into a byte
    again = NGram.restored(model.stored())
    assert np.array_equal(again.probabilities(TOKENS), model.probabilities(TOKENS))


def test_the_largest_that_fits():
    sizes = [len(NGram.fit(TOKENS, order, 4096).stored()) for order in (1, 2, 3)]
    assert sizes == sorted(sizes)
    model, size = largest(TOKENS, 4096, limit=sizes[2] - 1)
    assert (model.order, size) == (2, sizes[1])
    with pytest.raises(ValueError, match="20 bytes are too few"):
        largest(TOKENS, 4096, limit=20)


def test_orders_that_do_not_fit_are_named():
    with pytest.raises(
        ValueError, match=r"order 6 does not fit: with 4096 tokens it may be 1 to 5"
    ):
        NGram.fit(TOKENS, 6, 4096)
    with pytest.raises(ValueError, match="2 tokens are too few for n-grams of order 3"):
        NGram.fit([1, 2], 3, 8)
