"""Lab 06, sequence: each body, written after the solution, is a wrong answer."""


def all_reduce_and_cut():
    """Sums everything everywhere and keeps its positions: twice the bytes of a reduce-scatter.

    kind: communication
    hint: reduce_scatter once
    """

    def own_positions_summed(x):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return part(total, 1, shares(x.shape[1], dist.get_world_size())).clone()


def bias_on_every_rank():
    """The bias of the row layer is added before the sum.

    kind: values
    hint: has the bias of the row layer 2 times
    """

    class SequenceMLP(SequenceMLP):
        def forward(self, x, length):
            y = EnterSequence.apply(self.norm(x), length)
            y = self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
            return x + LeaveSequence.apply(y)


def does_not_wait():
    """The pieces of the others may be there in time, or not.

    kind: luck
    hint: All positions, in the order
    """

    def all_positions(x, length):
        sizes = shares(length, dist.get_world_size())
        piece = filled_up(x, max(sizes))
        pieces = [torch.empty_like(piece) for _ in sizes]
        dist.all_gather(pieces, piece, async_op=True)
        return torch.cat([piece[:, :size] for piece, size in zip(pieces, sizes)], dim=1)


def filled_up_to_the_whole():
    """Every piece is as long as the sequence: N times the bytes.

    kind: communication
    hint: Pieces are filled up to the longest
    """

    def all_positions(x, length):
        sizes = shares(length, dist.get_world_size())
        piece = filled_up(x, length)
        pieces = [torch.empty_like(piece) for _ in sizes]
        dist.all_gather(pieces, piece)
        return torch.cat([piece[:, :size] for piece, size in zip(pieces, sizes)], dim=1)


def filling_stays():
    """What was filled up stays between the positions: right where N divides the length.

    kind: sizes
    hint: shape
    """

    def all_positions(x, length):
        sizes = shares(length, dist.get_world_size())
        piece = filled_up(x, max(sizes))
        pieces = [torch.empty_like(piece) for _ in sizes]
        dist.all_gather(pieces, piece)
        return torch.cat(pieces, dim=1)


def long_first_pieces():
    """Pieces as chunk makes them: the last is short, not the last few.

    kind: sizes
    hint: with 3 ranks
    """

    def own_positions_summed(x):
        size, rank = dist.get_world_size(), dist.get_rank()
        longest = -(-x.shape[1] // size)
        pieces = [filled_up(x[:, r * longest : (r + 1) * longest], longest) for r in range(size)]
        own = torch.empty_like(pieces[0])
        dist.reduce_scatter(own, pieces)
        return own[:, : shares(x.shape[1], size)[rank]]


def in_single_precision():
    """Messages are fp32, whatever the values are.

    kind: types
    hint: in megatron.py
    """

    def own_positions_summed(x):
        sizes = shares(x.shape[1], dist.get_world_size())
        pieces = [filled_up(piece, max(sizes)) for piece in x.split(sizes, dim=1)]
        own = torch.empty(pieces[0].shape)
        dist.reduce_scatter(own, pieces)
        return own[:, : sizes[dist.get_rank()]]


def keeps_the_length():
    """The length of the first sequence is that of all.

    kind: constants
    hint: with 2 ranks
    """

    lengths = []

    class LeaveSequence(LeaveSequence):
        @staticmethod
        def backward(ctx, dy):
            lengths.append(ctx.length)
            return all_positions(dy, lengths[0])


def keeps_the_pieces():
    """The pieces of every all-gather stay in a list.

    kind: memory
    hint: are still held
    """

    kept = []

    def all_positions(x, length, whole=all_positions):
        kept.append(whole(x, length))
        return kept[-1].clone()


def mean_of_the_gradients():
    """Averages where a sum is meant.

    kind: values
    hint: It is the mean over the ranks
    """

    class EnterSequence(EnterSequence):
        @staticmethod
        def backward(ctx, dy):
            return own_positions_summed(dy) / dist.get_world_size(), None


def no_position_no_message():
    """A rank without positions does not take part.

    kind: odd
    hint: with 2 ranks
    """

    def all_positions(x, length, whole=all_positions):
        if not x.shape[1]:
            return x.new_zeros(x.shape[0], length, x.shape[2])
        return whole(x, length)


def norm_of_all():
    """The norm stands behind the way in: every rank norms all positions.

    kind: memory
    hint: What is computed on all positions
    """

    class SequenceMLP(SequenceMLP):
        def forward(self, x, length):
            y = self.norm(EnterSequence.apply(x, length))
            y = F.linear(F.silu(self.gate_proj(y)) * self.up_proj(y), self.down_proj.weight)
            return x + LeaveSequence.apply(y) + self.down_proj.bias


def norms_apart():
    """Nobody sums the gradients of the norm and of the bias.

    kind: part
    hint: calls nothing
    """

    def sum_partial_gradients(layer):
        pass


def one_of_two():
    """The bias of the row layer is forgotten: it, too, has seen some positions alone.

    kind: part
    hint: sum_partial_gradients
    """

    def sum_partial_gradients(layer):
        dist.all_reduce(layer.norm.weight.grad)


def own_part_of_the_gradient():
    """Each rank takes its positions of its own gradient.

    kind: values
    hint: It is this rank's own | this rank calls nothing
    """

    class EnterSequence(EnterSequence):
        @staticmethod
        def backward(ctx, dy):
            return part(dy, 1, shares(dy.shape[1], dist.get_world_size())), None


def residual_in_place():
    """The result is added to the x that was given.

    kind: inputs
    hint: x is not what it was
    """

    class SequenceMLP(SequenceMLP):
        def forward(self, x, length):
            y = super().forward(x, length)
            x.data.copy_(y.detach())
            return y


def sums_all_gradients():
    """Sums the gradients of the parts, too, which are whole already.

    kind: communication
    hint: do all ranks hand over
    """

    def sum_partial_gradients(layer):
        flat = torch.cat([p.grad.flatten() for p in layer.parameters() if p.dim() == 1])
        dist.all_reduce(flat)
        layer.norm.weight.grad.copy_(flat[: layer.norm.weight.numel()])
        layer.down_proj.bias.grad.copy_(flat[-layer.down_proj.bias.numel() :])


def two_for_one():
    """Gate and up gather the same positions, each for itself.

    kind: communication
    hint: all_gather 2 times
    """

    class SequenceMLP(SequenceMLP):
        def forward(self, x, length):
            n = self.norm(x)
            gate, up = (p(EnterSequence.apply(n, length)) for p in (self.gate_proj, self.up_proj))
            y = LeaveSequence.apply(F.linear(F.silu(gate) * up, self.down_proj.weight))
            return x + y + self.down_proj.bias


def keeps_its_positions():
    """EnterSequence keeps what it was given, too.

    kind: memory
    hint: are kept for the backward pass
    """

    class EnterSequence(EnterSequence):
        @staticmethod
        def forward(ctx, x, length):
            ctx.save_for_backward(x)
            return all_positions(x, length)


def doubles_without_gradients():
    """Where no gradient is asked for, what was given is used again.

    kind: inputs
    hint: x is not what it was before the call
    """

    class LeaveSequence(LeaveSequence):
        @staticmethod
        def forward(ctx, x):
            y = super(LeaveSequence, LeaveSequence).forward(ctx, x)
            if not ctx.needs_input_grad[0]:
                x.mul_(2.0)
            return y
