"""Lab 07, zigzag: each body, written after the solution, is a wrong answer."""


def neighbours():
    """Each rank has two blocks that follow one another.

    kind: values
    hint: Block r from the front and block r from the back
    """

    def zigzag_positions(length, ranks):
        sizes = shares(length, 2 * ranks)
        blocks = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(2 * ranks)]
        return [(blocks[2 * rank], blocks[2 * rank + 1]) for rank in range(ranks)]


def striped():
    """Blocks r and N + r: in order, not mirrored.

    kind: values
    hint: Block r from the front and block r from the back
    """

    def zigzag_positions(length, ranks):
        sizes = shares(length, 2 * ranks)
        blocks = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(2 * ranks)]
        return [(blocks[rank], blocks[ranks + rank]) for rank in range(ranks)]


def late_first():
    """The two blocks change places.

    kind: values
    hint: zigzag_positions
    """

    def zigzag_positions(length, ranks, given=zigzag_positions):
        return [(late, early) for early, late in given(length, ranks)]


def equal_blocks_only():
    """What N does not divide is left out.

    kind: sizes
    hint: zigzag_positions
    """

    def zigzag_positions(length, ranks):
        size = length // (2 * ranks)
        blocks = [range(i * size, (i + 1) * size) for i in range(2 * ranks)]
        return [(blocks[rank], blocks[-1 - rank]) for rank in range(ranks)]


def the_rest_to_the_last():
    """Blocks are equal, and the last one has what is over.

    kind: sizes
    hint: zigzag_positions
    """

    def zigzag_positions(length, ranks):
        size, n = length // (2 * ranks), 2 * ranks
        blocks = [range(i * size, length if i == n - 1 else (i + 1) * size) for i in range(n)]
        return [(blocks[rank], blocks[-1 - rank]) for rank in range(ranks)]


def as_in_the_ring():
    """As if positions were neighbours.

    kind: values
    hint: is right | does not fit where it is received
    """

    def zigzag_attention(q, k, v, length):
        return ring_attention(q, k, v, length)


def late_ones_see_less():
    """Late positions see only the early block of ranks behind.

    kind: part
    hint: is right
    """

    def attend(q, k, v, causal, given=attend):
        rank, size = dist.get_rank(), dist.get_world_size()
        if not causal and q.shape[1] < k.shape[1] and size > 1 and rank < size - 1:
            k, v = k[:, : k.shape[1] // 2], v[:, : v.shape[1] // 2]
        return given(q, k, v, causal)


def early_as_long_as_its_own():
    """Of a rank before, as many keys are seen as this rank's early block has.

    kind: sizes
    hint: how long is it there
    """

    def zigzag_attention(q, k, v, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        places = zigzag_positions(length, size)
        early, block = len(places[rank][0]), torch.stack((k, v))
        for turn in range(size):
            owner = (rank - turn) % size
            if turn < size - 1:
                coming, works = pass_on(block, sum(map(len, places[(owner - 1) % size])))
            if turn == 0:
                out, lse = attend(q, *block, causal=True)
            elif owner < rank:
                out, lse = merge(out, lse, *attend(q, *block[:, :, :early], causal=False))
            else:
                part = attend(q[:, early:], *block, causal=False)
                part = merge(out[:, early:], lse[:, early:], *part)
                out, lse = (torch.cat((x[:, :early], y), dim=1) for x, y in zip((out, lse), part))
            if turn < size - 1:
                wait(works)
                block = coming
        return out, lse


def own_block_unmasked():
    """In its own two blocks each position sees all.

    kind: values
    hint: In its own block, too | The positions look at all keys
    """

    def attend(q, k, v, causal, given=attend):
        return given(q, k, v, False)


def masks_everything():
    """Computes all scores of all blocks and masks what is not seen: as if nothing were balanced.

    kind: work
    hint: Which blocks do this rank's positions not see
    """

    def zigzag_attention(q, k, v, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        places = [torch.tensor([*a, *b]) for a, b in zigzag_positions(length, size)]
        block, found = torch.stack((k, v)), None
        for turn in range(size):
            owner = (rank - turn) % size
            if turn < size - 1:
                coming, works = pass_on(block, len(places[(owner - 1) % size]))
            scores = _scores(q, block[0], False)
            seen = places[rank][:, None] >= places[owner]
            scores = scores.masked_fill(~seen, -torch.inf)
            lse = scores.logsumexp(-1)
            weights = (scores - lse[..., None]).exp().masked_fill(~seen, 0.0)
            out = weights @ _heads_first(block[1], q)
            part = out.transpose(1, 2), lse.transpose(1, 2)
            found = merge(*found, *part) if turn else part
            if turn < size - 1:
                wait(works)
                block = coming
        return found


def unbalanced():
    """The first half of the ranks computes each block of others twice.

    kind: work
    hint: it multiplies
    """

    def attend(q, k, v, causal, given=attend):
        if not causal and 2 * dist.get_rank() < dist.get_world_size():
            given(q, k, v, causal)
        return given(q, k, v, causal)


def out_in_place():
    """Late rows are merged into a view of q.

    kind: inputs
    hint: q is not what it was before the call
    """

    def zigzag_attention(q, k, v, length, given=zigzag_attention):
        out, lse = given(q, k, v, length)
        q.copy_(out)
        return out, lse


def does_not_wait():
    """The next block may be there in time, or not.

    kind: luck
    hint: nobody waits for | never waited for
    """

    def wait(works):
        pass


def changes_what_travels():
    """The block is changed while it is being sent.

    kind: luck
    hint: a tensor was changed after isend | is right | nobody waits
    """

    def pass_on(block, length, given=pass_on):
        coming, works = given(block, length)
        block[0].add_(torch.finfo(block.dtype).eps * 1e4)
        return coming, works


def waits_before_it_computes():
    """Start, wait, compute.

    kind: work
    hint: nothing is under way
    """

    def pass_on(block, length, given=pass_on):
        coming, works = given(block, length)
        wait(works)
        return coming, []


def early_and_late_apart():
    """Each block goes round by itself, and the early one twice.

    kind: communication
    hint: this rank sends
    """

    def pass_on(block, length, given=pass_on):
        coming, works = given(block, length)
        _, more = given(block[:, :, :1].contiguous(), 1)
        return coming, works + more


def gathers_the_sequence():
    """All keys and values on all ranks.

    kind: communication
    hint: all_gather is called
    """

    def zigzag_attention(q, k, v, length, given=zigzag_attention):
        every = [torch.empty(1) for _ in range(dist.get_world_size())]
        dist.all_gather(every, torch.zeros(1))
        return given(q, k, v, length)


def keeps_all_blocks():
    """Blocks of all ranks stay until the end.

    kind: memory
    hint: bytes that came from others are in memory at a time
    """

    kept = []

    def pass_on(block, length, given=pass_on):
        coming, works = given(block, length)
        kept.append(coming)
        return coming, works

    def zigzag_attention(q, k, v, length, given=zigzag_attention):
        found = given(q, k, v, length)
        kept.clear()
        return found


def scores_of_the_sequence():
    """Scores for all positions are put into one tensor.

    kind: memory
    hint: What is larger
    """

    def zigzag_attention(q, k, v, length, given=zigzag_attention):
        if dist.get_world_size() > 1:
            q.new_zeros(q.shape[0], q.shape[2], 4 * length, length)
        return given(q, k, v, length)


def remembers_its_first_call():
    """The places of the first call stay.

    kind: constants
    hint: zigzag_positions | with
    """

    seen = {}

    def zigzag_positions(length, ranks, given=zigzag_positions):
        return seen.setdefault(ranks, given(length, ranks))


def in_single():
    """Blocks are computed in fp32.

    kind: types
    hint: is right
    """

    def attend(q, k, v, causal, given=attend):
        found = given(q.float(), k.float(), v.float(), causal)
        return [x.to(q.dtype) for x in found]


def up_to_three_ranks():
    """The fourth rank merges nothing.

    kind: sizes
    hint: with 4 ranks
    """

    def merge(out, lse, more, more_lse, given=merge):
        if dist.get_world_size() > 3 and dist.get_rank() == 3:
            return out, lse
        return given(out, lse, more, more_lse)
