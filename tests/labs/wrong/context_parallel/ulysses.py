"""Lab 07, ulysses: each body, written after the solution, is a wrong answer."""


def own_positions_only():
    """Attends to this rank's positions.

    kind: values
    hint: out at
    """

    def ulysses_attention(q, k, v, length):
        heads_of_ranks(q.shape[2], k.shape[2], dist.get_world_size())
        return attend(q, k, v, causal=True)[0]


def no_mask():
    """All positions see all.

    kind: values
    hint: The positions look at all keys
    """

    def attend(q, k, v, causal, given=attend):
        return given(q, k, v, False)


def keys_in_turn():
    """Query head i of a rank looks at its key-value head i, modulo their number.

    kind: values
    hint: which key-value head does each look at | is right
    """

    def ulysses_attention(q, k, v, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        lengths = shares(length, size)
        queries, keys = heads_of_ranks(q.shape[2], k.shape[2], size)
        b, t, _, d = q.shape
        n, m = len(queries[rank]), len(keys[rank])
        parts = [
            torch.cat((q[:, :, mine], k[:, :, theirs], v[:, :, theirs]), dim=2)
            for mine, theirs in zip(queries, keys)
        ]
        arrived = all_to_all(parts, [(b, t, n + 2 * m, d) for t in lengths])
        q, k, v = torch.cat(arrived, dim=1).split((n, m, m), dim=2)
        looks_at = [i % m for i in range(n)]
        out, _ = attend(q, k[:, :, looks_at], v[:, :, looks_at], causal=True)
        shapes = [(b, t, len(mine), d) for mine in queries]
        return torch.cat(all_to_all(list(out.split(lengths, dim=1)), shapes), dim=2)


def heads_first():
    """A rank's positions arrive, and are read as if heads stood before positions.

    kind: values
    hint: out at
    """

    def all_to_all(parts, shapes, given=all_to_all):
        wrong = [(s[0], s[2], s[1], s[3]) for s in shapes]
        return [x.transpose(1, 2) for x in given(parts, wrong)]


def heads_in_turn():
    """Rank r computes heads r, r + N …

    kind: values
    hint: Neighbouring query heads
    """

    def heads_of_ranks(heads, kv_heads, ranks):
        if ranks > heads:
            raise ValueError("more ranks than heads")
        queries = [list(range(rank, heads, ranks)) for rank in range(ranks)]
        group = heads // kv_heads
        return queries, [sorted({head // group for head in mine}) for mine in queries]


def one_key_head_for_each():
    """A key-value head for every query head: some travel several times.

    kind: communication
    hint: each once
    """

    def heads_of_ranks(heads, kv_heads, ranks, given=heads_of_ranks):
        queries, _ = given(heads, kv_heads, ranks)
        return queries, [[head // (heads // kv_heads) for head in mine] for mine in queries]


def shares_of_keys():
    """Key-value heads are shared out by themselves.

    kind: sizes
    hint: the key-value heads are
    """

    def heads_of_ranks(heads, kv_heads, ranks, given=heads_of_ranks):
        queries, _ = given(heads, kv_heads, ranks)
        counts = shares(kv_heads, ranks)
        return queries, [list(range(sum(counts[:r]), sum(counts[: r + 1]))) for r in range(ranks)]


def too_many_ranks():
    """Ranks without a head are let through.

    kind: odd
    hint: a ValueError says so
    """

    def heads_of_ranks(heads, kv_heads, ranks):
        counts, group = shares(heads, ranks), heads // kv_heads
        queries = [[*range(sum(counts[:r]), sum(counts[: r + 1]))] for r in range(ranks)]
        return queries, [sorted({head // group for head in mine}) for mine in queries]


def asks_too_late():
    """Sends the queries before it asks whether the heads suffice.

    kind: odd
    hint: before the ValueError is raised
    """

    def ulysses_attention(q, k, v, length, given=ulysses_attention):
        if dist.get_world_size() > q.shape[2]:
            dist.all_reduce(torch.zeros(1))
        return given(q, k, v, length)


def as_many_keys_as_ranks():
    """Refuses fewer key-value heads than ranks.

    kind: sizes
    hint: raises ValueError
    """

    def heads_of_ranks(heads, kv_heads, ranks, given=heads_of_ranks):
        if ranks > kv_heads:
            raise ValueError("too few key-value heads")
        return given(heads, kv_heads, ranks)


def equal_positions():
    """Takes every rank's positions for as many as its own.

    kind: sizes
    hint: with 2 ranks
    """

    def shares(total, ranks, given=shares):
        return (-(-total // ranks),) * ranks if total > 40 or total % ranks else given(total, ranks)

    def heads_of_ranks(heads, kv_heads, ranks, share=shares.__defaults__[0]):
        if ranks > heads:
            raise ValueError("more ranks than heads")
        counts, group = share(heads, ranks), heads // kv_heads
        queries = [[*range(sum(counts[:r]), sum(counts[: r + 1]))] for r in range(ranks)]
        return queries, [sorted({head // group for head in mine}) for mine in queries]


def gathers():
    """All positions of all heads everywhere, of which each takes its own.

    kind: communication
    hint: all_gather is called
    """

    def ulysses_attention(q, k, v, length, given=ulysses_attention):
        found = given(q, k, v, length)
        every = [torch.empty(1) for _ in range(dist.get_world_size())]
        dist.all_gather(every, torch.zeros(1))
        return found


def keys_to_everybody():
    """All key-value heads to all ranks.

    kind: communication
    hint: bytes to others
    """

    def ulysses_attention(q, k, v, length, mine=heads_of_ranks):
        rank, size = dist.get_rank(), dist.get_world_size()
        lengths, kv = shares(length, size), k.shape[2]
        queries, _ = mine(q.shape[2], kv, size)
        b, t, heads, d = q.shape
        n = len(queries[rank])
        parts = [torch.cat((q[:, :, own], k, v), dim=2) for own in queries]
        arrived = all_to_all(parts, [(b, t, n + 2 * kv, d) for t in lengths])
        q, k, v = torch.cat(arrived, dim=1).split((n, kv, kv), dim=2)
        looks_at = [head // (heads // kv) for head in queries[rank]]
        out, _ = attend(q, k[:, :, looks_at], v[:, :, looks_at], causal=True)
        shapes = [(b, t, len(own), d) for own in queries]
        return torch.cat(all_to_all(list(out.split(lengths, dim=1)), shapes), dim=2)


def head_by_head():
    """An all-to-all for each head.

    kind: communication
    hint: Two will do
    """

    def all_to_all(parts, shapes, given=all_to_all):
        for _ in range(2):
            given([x[:0] for x in parts], [(0,) for _ in shapes])
        return given(parts, shapes)


def in_double():
    """fp32 travels as fp64.

    kind: types
    hint: bytes to others
    """

    def all_to_all(parts, shapes, given=all_to_all):
        found = given([x.double() for x in parts], shapes)
        return [x.to(parts[0].dtype) for x in found]


def does_not_wait():
    """What arrives may be there in time, or not.

    kind: luck
    hint: out at | did not
    """

    def all_to_all(parts, shapes):
        send = [part.numel() for part in parts]
        receive = [torch.Size(shape).numel() for shape in shapes]
        arrived = parts[0].new_zeros(sum(receive))
        rows = torch.cat([part.flatten() for part in parts])
        dist.all_to_all_single(arrived, rows, receive, send, async_op=True)
        return [part.view(shape) for part, shape in zip(arrived.split(receive), shapes)]


def computes_all_heads():
    """Every rank computes twice as many heads as it has.

    kind: work
    hint: This rank's heads, and no others
    """

    def attend(q, k, v, causal, given=attend):
        given(q, k, v, causal)
        return given(q, k, v, causal)


def one_large_tensor():
    """Puts what arrives into a tensor for all heads.

    kind: memory
    hint: some heads of all positions
    """

    def attend(q, k, v, causal, given=attend):
        q.new_zeros(q.shape[0], q.shape[1], 40, q.shape[2], q.shape[1] + q.shape[3])
        return given(q, k, v, causal)


def keeps_what_arrived():
    """The heads of the last call stay in a list.

    kind: memory
    hint: are still held
    """

    kept = []

    def all_to_all(parts, shapes, given=all_to_all):
        kept[:] = given(parts, shapes)
        return list(kept)


def remembers_its_first_call():
    """How the positions are shared out is remembered.

    kind: constants
    hint: with
    """

    seen = {}

    def all_to_all(parts, shapes, given=all_to_all):
        shapes = seen.setdefault((len(shapes), len(seen) % 2), shapes)
        return given(parts, shapes)


def scales_in_place():
    """q is divided by √D where it stands.

    kind: inputs
    hint: q is not what it was before the call
    """

    def ulysses_attention(q, k, v, length, given=ulysses_attention):
        found = given(q, k, v, length)
        q.mul_(0.5)
        return found


def library():
    """The course's own.

    kind: library
    hint: that is the library
    """

    def ulysses_attention(q, k, v, length, given=ulysses_attention):
        from utils.parallel.context import ulysses

        return given(q, k, v, length) if ulysses else None


def asserts():
    """More ranks than heads end in an AssertionError.

    kind: odd
    hint: a ValueError says so
    """

    def heads_of_ranks(heads, kv_heads, ranks, given=heads_of_ranks):
        assert heads >= ranks
        return given(heads, kv_heads, ranks)
