"""Lab 07, backward: each body, written after the solution, is a wrong answer."""


def own_keys_only():
    """What other ranks add is missing.

    kind: values
    hint: is right
    """

    def ring_attention_backward(dout, q, k, v, out, lse, length):
        return attend_backward(dout, q, k, v, out, lse, causal=True)


def gradients_stay():
    """dq is whole; dk and dv are of this rank's own queries only.

    kind: part
    hint: dq is right
    """

    def ring_attention_backward(dout, q, k, v, out, lse, length, given=ring_attention_backward):
        dq, _, _ = given(dout, q, k, v, out, lse, length)
        return dq, *attend_backward(dout, q, k, v, out, lse, causal=True)[1:]


def one_turn_short():
    """The gradients do not come home: each rank ends with those of the rank behind it.

    kind: values
    hint: how many turns does a gradient travel | with
    """

    def ring_attention_backward(dout, q, k, v, out, lse, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return attend_backward(dout, q, k, v, out, lse, causal=True)
        sizes, block = shares(length, size), torch.stack((k, v))
        dq, arriving, last = torch.zeros_like(q), None, []
        for turn in range(size):
            owner = (rank - turn) % size
            before = sizes[(owner - 1) % size]
            if turn < size - 1:
                coming, works = pass_on(block, before)
            gradient = torch.zeros_like(block)
            if owner <= rank:
                part, *parts = attend_backward(dout, q, *block, out, lse, causal=turn == 0)
                dq, gradient = dq + part, torch.stack(parts)
            if turn:
                wait(last)
                gradient += arriving
            if turn < size - 1:
                arriving, last = pass_on(gradient, before)
                wait(works)
                block = coming
        return dq, gradient[0], gradient[1]


def lse_of_each_block():
    """The weights of a block are made with the block's own lse, as if there were no other.

    kind: values
    hint: out and lse of the attention to all keys | with which lse
    """

    def attend_backward(dout, q, k, v, out, lse, causal, given=attend_backward):
        out, lse = attend(q, k, v, causal)
        return given(dout, q, k, v, out, lse, causal)


def last_dq_only():
    """dq is not summed.

    kind: values
    hint: dq is the sum over all blocks
    """

    def ring_attention_backward(dout, q, k, v, out, lse, length, given=ring_attention_backward):
        _, dk, dv = given(dout, q, k, v, out, lse, length)
        return attend_backward(dout, q, k, v, out, lse, causal=True)[0], dk, dv


def does_not_wait():
    """Gradients may have come, or not.

    kind: luck
    hint: nobody waits for | never waited for
    """

    def wait(works):
        pass


def waits_for_the_receive_only():
    """Whether a gradient was sent before it changes is luck.

    kind: luck
    hint: nobody waits for an isend
    """

    def wait(works):
        if works:
            works[-1].wait()


def adds_to_what_travels():
    """The gradient of the next turn is put into memory that is still being sent.

    kind: luck
    hint: a tensor was changed after isend | is right
    """

    def pass_on(block, length, given=pass_on):
        coming, works = given(block, length)
        block.mul_(1 + torch.finfo(block.dtype).eps)
        return coming, works


def all_reduce():
    """Everybody sums all gradients, and takes its own.

    kind: communication
    hint: all_reduce is called
    """

    def ring_attention_backward(dout, q, k, v, out, lse, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        sizes, block = shares(length, size), torch.stack((k, v))
        places = [sum(sizes[:r]) for r in range(size)]
        sums = k.new_zeros(2, len(k), length, *k.shape[2:])
        dq = torch.zeros_like(q)
        for turn in range(size):
            owner = (rank - turn) % size
            if turn < size - 1:
                coming, works = pass_on(block, sizes[(owner - 1) % size])
            if owner <= rank:
                part, *parts = attend_backward(dout, q, *block, out, lse, causal=turn == 0)
                dq = dq + part
                sums[:, :, places[owner] : places[owner] + sizes[owner]] += torch.stack(parts)
            if turn < size - 1:
                wait(works)
                block = coming
        dist.all_reduce(sums)
        return dq, *sums[:, :, places[rank] : places[rank] + sizes[rank]]


def gradients_go_back():
    """To the rank before: half of the ring runs the other way.

    kind: communication
    hint: In a ring it sends to the next
    """

    def ring_attention_backward(dout, q, k, v, out, lse, length, given=ring_attention_backward):
        found = given(dout, q, k, v, out, lse, length)
        rank, size = dist.get_rank(), dist.get_world_size()
        if size > 2:
            token = torch.zeros(1)
            one = dist.isend(token, (rank - 1) % size)
            dist.irecv(torch.empty(1), (rank + 1) % size).wait()
            one.wait()
        return found


def keys_twice():
    """Each block travels once for dq and once more for dk and dv.

    kind: communication
    hint: this rank sends
    """

    def ring_attention_backward(dout, q, k, v, out, lse, length, given=ring_attention_backward):
        found = given(dout, q, k, v, out, lse, length)
        return found[0], *given(dout, q, k, v, out, lse, length)[1:]


def together():
    """Block and gradient travel in one message, when the rank has computed: nobody hides anything.

    kind: work
    hint: it computes while nothing is under way
    """

    def ring_attention_backward(dout, q, k, v, out, lse, length):
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return attend_backward(dout, q, k, v, out, lse, causal=True)
        sizes, block = shares(length, size), torch.stack((k, v))
        gradient, dq = torch.zeros_like(block), torch.zeros_like(q)
        for turn in range(size):
            owner = (rank - turn) % size
            if owner <= rank:
                part, *parts = attend_backward(dout, q, *block, out, lse, causal=turn == 0)
                dq, gradient = dq + part, gradient + torch.stack(parts)
            before = sizes[(owner - 1) % size]
            if turn < size - 1:
                coming, works = pass_on(torch.cat((block, gradient)), before)
                wait(works)
                block, gradient = coming[:2].contiguous(), coming[2:]
            else:
                gradient, works = pass_on(gradient, before)
                wait(works)
        return dq, *gradient


def computes_what_nobody_sees():
    """Unseen blocks are multiplied, too, and then left out.

    kind: work
    hint: Which blocks do this rank's positions not see
    """

    def ring_attention_backward(dout, q, k, v, out, lse, length, given=ring_attention_backward):
        found = given(dout, q, k, v, out, lse, length)
        if dist.get_rank() == 0 and dist.get_world_size() > 1:
            attend_backward(dout, q, k, v, out, lse, causal=False)
        return found


def weights_again():
    """The attention itself is computed once more in every turn.

    kind: work
    hint: it multiplies
    """

    def attend_backward(dout, q, k, v, out, lse, causal, given=attend_backward):
        attend(q, k, v, causal)
        return given(dout, q, k, v, out, lse, causal)


def equal_shares():
    """Gradients are taken for as long as this rank's own.

    kind: sizes
    hint: with 2 ranks
    """

    def pass_on(block, length, given=pass_on):
        return given(block, block.shape[2])


def keeps_all_blocks():
    """Blocks and gradients of all ranks stay until the end.

    kind: memory
    hint: bytes that came from others are in memory at a time
    """

    kept = []

    def pass_on(block, length, given=pass_on):
        coming, works = given(block, length)
        kept.append(coming)
        return coming, works

    def ring_attention_backward(dout, q, k, v, out, lse, length, given=ring_attention_backward):
        found = given(dout, q, k, v, out, lse, length)
        kept.clear()
        return found


def changes_the_gradient():
    """dout is divided by √D in place.

    kind: inputs
    hint: dout is not what it was before the call
    """

    def ring_attention_backward(dout, q, k, v, out, lse, length, given=ring_attention_backward):
        found = given(dout, q, k, v, out, lse, length)
        dout.mul_(0.5)
        return found


def in_single():
    """Gradients travel in fp32.

    kind: types
    hint: is right
    """

    def attend_backward(dout, q, k, v, out, lse, causal, given=attend_backward):
        found = given(dout, q, k, v, out, lse, causal)
        return [x.float().to(x.dtype) for x in found]


def no_gradient_where_it_is_small():
    """A rank whose keys are all small adds nothing.

    kind: odd
    hint: is right
    """

    def attend_backward(dout, q, k, v, out, lse, causal, given=attend_backward):
        dq, dk, dv = given(dout, q, k, v, out, lse, causal)
        return dq, dk.where(dk.abs() > 1e-2, 0.0), dv.where(dv.abs() > 1e-2, 0.0)
