"""Lab 07, ring: each body, written after the solution, is a wrong answer."""


def own_keys_only():
    """Blocks go round, and nobody computes with them.

    kind: values
    hint: this rank's own keys only
    """

    def ring_attention(q, k, v, length):
        return attend(q, k, v, causal=True)


def no_mask():
    """All positions see all.

    kind: values
    hint: The positions look at all keys
    """

    def ring_attention(q, k, v, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        sizes, block, found = shares(length, size), torch.stack((k, v)), None
        for turn in range(size):
            if turn < size - 1:
                coming, works = pass_on(block, sizes[(rank - turn - 1) % size])
            part = attend(q, *block, causal=False)
            found = part if found is None else merge(*found, *part)
            if turn < size - 1:
                wait(works)
                block = coming
        return found


def own_block_unmasked():
    """Other blocks are right, in its own each position sees those behind it.

    kind: values
    hint: In its own block, too | The positions look at all keys
    """

    def attend(q, k, v, causal, given=attend):
        return given(q, k, v, False)


def always_masked():
    """causal in every turn, as if other blocks were the rank's own.

    kind: values
    hint: causal is for the first turn only | causal=True | Whose keys are here
    """

    def attend(q, k, v, causal, given=attend):
        if q.shape[1] == k.shape[1]:
            return given(q, k, v, True)
        return given(q, k, v, causal)


def lse_of_the_last_block():
    """out is merged, lse is not.

    kind: part
    hint: lse
    """

    def ring_attention(q, k, v, length, given=ring_attention):
        out, _ = given(q, k, v, length)
        return out, attend(q, k, v, causal=True)[1]


def does_not_wait():
    """The next block may be there in time, or not.

    kind: luck
    hint: nobody waits for | never waited for
    """

    def wait(works):
        pass


def waits_for_the_receive_only():
    """Whether a block was sent before its memory is used again is luck.

    kind: luck
    hint: nobody waits for an isend
    """

    def wait(works):
        works[-1].wait()


def blocking():
    """All send first: nobody receives.

    kind: end
    hint: with 2 ranks
    """

    def pass_on(block, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        shape = list(block.shape)
        shape[2] = length
        coming = block.new_empty(shape)
        dist.send(block, (rank + 1) % size)
        dist.recv(coming, (rank - 1) % size)
        return coming, []


def gathers():
    """All keys and values on every rank.

    kind: communication
    hint: all_gather is called
    """

    def ring_attention(q, k, v, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        sizes = shares(length, size)
        block = torch.stack((k, v)).transpose(0, 2).contiguous()
        wide = block.new_zeros(sizes[0], *block.shape[1:])
        wide[: len(block)] = block
        blocks = [torch.empty_like(wide) for _ in sizes]
        dist.all_gather(blocks, wide)
        found = attend(q, k, v, True)
        for one, count in list(zip(blocks, sizes))[:rank]:
            found = merge(*found, *attend(q, *one[:count].transpose(0, 2), causal=False))
        return found


def keys_twice():
    """A message for both, and one more for the keys.

    kind: communication
    hint: this rank sends
    """

    def pass_on(block, length, given=pass_on):
        coming, works = given(block, length)
        _, more = given(block[:1].contiguous(), length)
        return coming, works + more


def one_turn_more():
    """The blocks come home again: N messages.

    kind: communication
    hint: Which block does the next rank have already
    """

    def ring_attention(q, k, v, length, given=ring_attention):
        found = given(q, k, v, length)
        rank, size = dist.get_rank(), dist.get_world_size()
        if size > 1:
            sizes = shares(length, size)
            last = torch.zeros(2, *k.shape, dtype=k.dtype)[:, :, :1].repeat(
                1, 1, sizes[(rank + 1) % size], 1, 1
            )
            wait(pass_on(last, sizes[rank])[1])
        return found


def in_double():
    """Blocks travel in fp64.

    kind: types
    hint: wider than it is
    """

    def pass_on(block, length, given=pass_on):
        wide, works = given(block.double(), length)
        coming = torch.empty(wide.shape, dtype=block.dtype)

        class Narrow:
            def wait(self):
                for work in works:
                    work.wait()
                coming.copy_(wide)

        return coming, [Narrow()]


def waits_before_it_computes():
    """Start, wait, compute: nothing is under way while it computes.

    kind: work
    hint: nothing is under way to this rank
    """

    def pass_on(block, length, given=pass_on):
        coming, works = given(block, length)
        wait(works)
        return coming, []


def sends_when_it_has_computed():
    """The receive is started in time, the send only after computing: nothing travels until then.

    kind: work
    hint: nothing is under way from this rank
    """

    def pass_on(block, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        shape = list(block.shape)
        shape[2] = length
        coming = block.new_empty(shape)
        receive = dist.irecv(coming, (rank - 1) % size)

        class Both:
            def wait(self):
                dist.isend(block, (rank + 1) % size).wait()
                receive.wait()

        return coming, [Both()]


def computes_what_nobody_sees():
    """All blocks are multiplied, and those behind count for nothing.

    kind: work
    hint: Which blocks do this rank's positions not see
    """

    def ring_attention(q, k, v, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        sizes, block, found = shares(length, size), torch.stack((k, v)), None
        for turn in range(size):
            owner = (rank - turn) % size
            if turn < size - 1:
                coming, works = pass_on(block, sizes[(owner - 1) % size])
            out, lse = attend(q, *block, causal=turn == 0)
            if owner > rank:
                out, lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
            found = merge(*found, out, lse) if turn else (out, lse)
            if turn < size - 1:
                wait(works)
                block = coming
        return found


def all_blocks_first():
    """Collects all blocks, and then computes.

    kind: memory
    hint: bytes that came from others are in memory at a time | nothing is under way
    """

    def ring_attention(q, k, v, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        sizes, blocks = shares(length, size), [torch.stack((k, v))]
        found = None
        for turn in range(size):
            if turn < size - 1:
                coming, works = pass_on(blocks[-1], sizes[(rank - turn - 1) % size])
            if turn <= rank:
                part = attend(q, *blocks[turn], causal=turn == 0)
                found = merge(*found, *part) if turn else part
            if turn < size - 1:
                wait(works)
                blocks.append(coming)
        return found


def all_keys_in_one_tensor():
    """Blocks come into one tensor that has room for all.

    kind: memory
    hint: What is larger | bytes that came from others are in memory at a time
    """

    def ring_attention(q, k, v, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        sizes = shares(length, size)
        room = k.new_empty(size, 2 * len(k) * sizes[0] * k.shape[2] * k.shape[3])
        shapes = [torch.Size((2, len(k), count, *k.shape[2:])) for count in sizes]
        blocks = [row[: one.numel()].view(one) for row, one in zip(room, shapes)]
        blocks[rank].copy_(torch.stack((k, v)))
        for turn in range(size):
            owner, works = (rank - turn) % size, []
            if turn < size - 1:
                works = [
                    dist.isend(blocks[owner], (rank + 1) % size),
                    dist.irecv(blocks[owner - 1], (rank - 1) % size),
                ]
            if owner <= rank:
                part = attend(q, *blocks[owner], causal=turn == 0)
                found = merge(*found, *part) if turn else part
            wait(works)
        return found


def scores_of_the_sequence():
    """Puts all scores together before it takes the softmax.

    kind: memory
    hint: What is larger
    """

    def attend(q, k, v, causal, given=attend):
        out, lse = given(q, k, v, causal)
        torch.empty(q.shape[0], q.shape[2], q.shape[1], 40 * k.shape[1], dtype=q.dtype)
        return out, lse


def equal_shares():
    """Takes every block for as long as its own.

    kind: sizes
    hint: with 2 ranks
    """

    def pass_on(block, length, given=pass_on):
        return given(block, block.shape[2])


def first_in_the_ring():
    """The number of the owner is counted the wrong way round.

    kind: values
    hint: with
    """

    def ring_attention(q, k, v, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        sizes, block, found = shares(length, size), torch.stack((k, v)), None
        for turn in range(size):
            owner = (rank + turn) % size
            if turn < size - 1:
                coming, works = pass_on(block, sizes[(rank - turn - 1) % size])
            if owner <= rank:
                part = attend(q, *block, causal=turn == 0)
                found = merge(*found, *part) if turn else part
            if turn < size - 1:
                wait(works)
                block = coming
        return found


def three_ranks():
    """No more than three turns.

    kind: sizes
    hint: with 4 ranks
    """

    def ring_attention(q, k, v, length, given=ring_attention):
        rank, size = dist.get_rank(), dist.get_world_size()
        if size < 4:
            return given(q, k, v, length)
        sizes, block = shares(length, size), torch.stack((k, v))
        found = None
        for turn in range(3):
            if turn < 2:
                coming, works = pass_on(block, sizes[(rank - turn - 1) % size])
            if turn <= rank:
                part = attend(q, *block, causal=turn == 0)
                found = merge(*found, *part) if turn else part
            if turn < 2:
                wait(works)
                block = coming
        return found


def remembers_its_first_call():
    """The shares of the first call stay.

    kind: constants
    hint: with 2 ranks
    """

    seen = {}

    def shares(length, ranks, given=shares):
        return seen.setdefault(ranks, given(length, ranks))


def keeps_the_last_block():
    """What came last stays in a list.

    kind: memory
    hint: are still held
    """

    kept = []

    def pass_on(block, length, given=pass_on):
        coming, works = given(block, length)
        kept[:] = [coming]
        return coming, works


def scales_in_place():
    """q is divided by √D where it stands.

    kind: inputs
    hint: q is not what it was before the call
    """

    def ring_attention(q, k, v, length, given=ring_attention):
        found = given(q, k, v, length)
        q.mul_(q.shape[-1] ** -0.5)
        return found


def to_all_others():
    """Sends its block to every rank that needs it, itself.

    kind: communication
    hint: In a ring it sends to the next | nothing is under way to this rank
    """

    def ring_attention(q, k, v, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        sizes, block = shares(length, size), torch.stack((k, v))
        works = [dist.isend(block, other) for other in range(rank + 1, size)]
        found = attend(q, k, v, True)
        for other in range(rank):
            coming = block.new_empty(2, len(k), sizes[other], *k.shape[2:])
            dist.irecv(coming, other).wait()
            found = merge(*found, *attend(q, *coming, causal=False))
        wait(works)
        return found


def library():
    """The course's own ring.

    kind: library
    hint: that is the library
    """

    def ring_attention(q, k, v, length):
        from utils.parallel.context.blocks import attend

        return attend(q, k, v, True)
