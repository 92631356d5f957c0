"""An n-gram model of tokens by hand: prediction by counting alone.

Interpolated Kneser-Ney smoothing with three discounts ("modified", Chen and Goodman 1998, An
Empirical Study of Smoothing Techniques for Language Modeling, section 3). With h the n - 1 tokens
before w, h' all of them but the first, and c the count,

    p_n(w | h) = (c(hw) - D(c(hw))) / c(h) + (D1 N1(h) + D2 N2(h) + D3 N3(h)) / c(h) · p_n-1(w | h')

N1, N2 and N3 are the numbers of different w that follow h once, twice, and more often. The count of
a longest n-gram is its number of occurrences; that of a shorter one is the number of different
tokens before it. So a stored model consists only of its longest n-grams and their counts:

    model = NGram.fit(tokens, order=4, vocabulary=4096)
    bits = model.bits(held_out)               # of every token, (T,)
    len(model.stored())                       # bytes
"""

import lzma

import numpy as np


class NGram:
    """Counts of n-grams up to `order`; each n-gram's tokens are packed into one integer."""

    def __init__(self, keys, counts, order, vocabulary):
        """keys: the longest n-grams, packed and sorted, int64 (N,); counts (N,)."""
        self.order, self.vocabulary = order, vocabulary
        self.width = _width(order, vocabulary)
        self.levels = [None] * order
        for n in range(order, 0, -1):
            self.levels[n - 1] = _Level(keys, counts, self.width)
            if n > 1:  # the count of an (n - 1)-gram is the number of different tokens before it
                shorter = keys & ((1 << self.width * (n - 1)) - 1)
                keys, counts = np.unique(shorter, return_counts=True)

    @classmethod
    def fit(cls, tokens, order, vocabulary):
        """The model of a 1-D array of tokens; raises ValueError if the order is too large."""
        tokens = np.asarray(tokens, dtype=np.int64)
        if len(tokens) < order:
            raise ValueError(f"{len(tokens)} tokens are too few for n-grams of order {order}")
        packed = _packed(tokens, order, _width(order, vocabulary))[order - 1 :]
        return cls(*np.unique(packed, return_counts=True), order, vocabulary)

    def probabilities(self, tokens):
        """The probability of each token given the preceding ones, (T,); the first have fewer."""
        tokens = np.asarray(tokens, dtype=np.int64)
        result = np.full(len(tokens), 1.0 / self.vocabulary)
        for n, level in enumerate(self.levels, start=1):
            keys = _packed(tokens, n, self.width)
            result[n - 1 :] = level.interpolate(keys[n - 1 :], result[n - 1 :])
        return result

    def bits(self, tokens):
        """-log2 of the probability of each token, (T,)."""
        return -np.log2(self.probabilities(tokens))

    def stored(self):
        """The whole model as bytes, compressed by xz; `restored` reads it."""
        top = self.levels[-1]
        steps = np.diff(top.keys, prepend=0)
        # grouped by byte position, they compress better than as integers
        columns = np.ascontiguousarray(steps[:, None].view(np.uint8).T)
        header = np.array([self.order, self.vocabulary, len(steps)], dtype=np.int64)
        small = np.minimum(top.counts, 255).astype(np.uint8)
        large = top.counts[top.counts >= 255].astype(np.int64)
        parts = [header, columns, small, large]
        return lzma.compress(b"".join(part.tobytes() for part in parts), preset=6)

    @classmethod
    def restored(cls, data):
        """The model from the bytes of `stored`."""
        data = lzma.decompress(data)
        order, vocabulary, size = np.frombuffer(data, np.int64, 3).tolist()
        columns = np.frombuffer(data, np.uint8, 8 * size, offset=24).reshape(8, size)
        steps = np.ascontiguousarray(columns.T).view(np.int64)[:, 0]
        counts = np.frombuffer(data, np.uint8, size, offset=24 + 8 * size).astype(np.int64)
        counts[counts == 255] = np.frombuffer(data, np.int64, -1, offset=24 + 9 * size)
        return cls(np.cumsum(steps), counts, order, vocabulary)


class _Level:
    """The n-grams of one length: sorted keys, counts, and sums over the tokens after a context."""

    def __init__(self, keys, counts, width):
        self.keys, self.counts, self.width = keys, counts, width
        first, second, third, fourth = (max(1, int((counts == c).sum())) for c in (1, 2, 3, 4))
        share = first / (first + 2 * second)
        ratios = (second / first, third / second, fourth / third)
        wanted = [c - (c + 1) * share * ratio for c, ratio in enumerate(ratios, start=1)]
        # with few n-grams an estimate may be negative or exceed the count
        fitting = [min(max(d, 0.1), c - 0.1) for c, d in enumerate(wanted, start=1)]
        self.discounts = np.array([0.0, *fitting])  # by count; the last is for 3 and more
        contexts = keys >> width
        self.contexts, starts = np.unique(contexts, return_index=True)
        self.totals = np.add.reduceat(counts, starts)
        taken = self.discounts[np.minimum(counts, 3)]
        self.spared = np.add.reduceat(taken, starts)  # the mass that discounts give to shorter ones

    def interpolate(self, keys, lower):
        """p_n of the packed n-grams, given p_n-1; equal to p_n-1 if the context is unknown."""
        context = keys >> self.width
        row = _find(self.contexts, context)
        known = row >= 0
        entry = _find(self.keys, keys)
        count = np.where(entry >= 0, self.counts[entry], 0)
        kept = count - self.discounts[np.minimum(count, 3)]
        mixed = (kept + self.spared[row] * lower) / self.totals[row]
        return np.where(known, mixed, lower)


def largest(tokens, vocabulary, limit):
    """(model, size): the highest order whose stored model has at most `limit` bytes."""
    best = None, 0
    for order in range(1, 63 // _width(1, vocabulary) + 1):
        model = NGram.fit(tokens, order, vocabulary)
        size = len(model.stored())
        if size > limit:
            break
        best = model, size
    if best[0] is None:
        raise ValueError(
            f"{limit} bytes are too few for an n-gram model: even order 1 takes {size}"
        )
    return best


def _width(order, vocabulary):
    """Bits of one token in a packed n-gram."""
    width = max(1, int(vocabulary - 1).bit_length())
    if order < 1 or width * order > 63:
        raise ValueError(
            f"order {order} does not fit: with {vocabulary} tokens it may be 1 to {63 // width}"
        )
    return width


def _packed(tokens, n, width):
    """The last n tokens at every position as one integer; the first n - 1 contain fewer."""
    keys = tokens.copy()
    for distance in range(1, n):
        keys[distance:] |= tokens[:-distance] << (width * distance)
    return keys


def _find(table, values):
    """The row of each value in a sorted table, -1 if it is absent."""
    rows = np.minimum(np.searchsorted(table, values), len(table) - 1)
    return np.where(table[rows] == values, rows, -1)
