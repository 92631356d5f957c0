"""Lab 09, dispatch: each body, written after the solution, is a wrong answer."""


def by_rank():
    """Leaves the rows in the order in which they came.

    kind: values
    hint: they came rank by rank
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        rows, way = _dispatch(tokens, chosen, experts)
        return rows[way.by_expert.argsort()], way


def first_choice_only():
    """Sends each token to its first expert only.

    kind: part
    hint: way.loads is
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        return _dispatch(tokens, chosen[:, :1], experts)


def full_experts():
    """Drops what is more than a fair share.

    kind: values
    hint: way.loads is
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        rows, way = _dispatch(tokens, chosen, experts)
        fair = -(-sum(way.loads) // len(way.loads))
        kept = [part[:fair] for part in rows.split(way.loads)]
        way.loads = [len(part) for part in kept]
        return torch.cat(kept), way


def nobody_tells():
    """Expects as many rows as it sends itself.

    kind: communication
    hint: who tells it the others'?
    """

    def tell(counts):
        return counts.view(dist.get_world_size(), -1)


def not_sorted():
    """Sends the choices in the order of the tokens.

    kind: values
    hint: way.order does not put
    """

    def dispatch(tokens, chosen, experts):
        size = dist.get_world_size()
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        arriving = tell(counts)
        own = torch.arange(experts // size).repeat(size)
        way = Way(
            order=torch.arange(chosen.numel()),
            send=counts.view(size, -1).sum(dim=1).tolist(),
            receive=arriving.sum(dim=1).tolist(),
            by_expert=own.repeat_interleave(arriving.flatten()).argsort(stable=True),
            loads=arriving.sum(dim=0).tolist(),
        )
        rows = AllToAll.apply(tokens[way.order // chosen.shape[1]], way.send, way.receive)
        return rows[way.by_expert], way


def nothing_to_send():
    """A rank without tokens does not take part.

    kind: odd
    hint: way.loads is
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        if len(tokens) == 0:
            nothing = torch.arange(0)
            size = dist.get_world_size()
            return tokens, Way(nothing, [0] * size, [0] * size, nothing, [0] * (experts // size))
        return _dispatch(tokens, chosen, experts)


def place_is_not_a_token():
    """Takes the place of a choice for the number of a token.

    kind: values
    hint: A row is tokens[place // k]
    """

    def dispatch(tokens, chosen, experts):
        size, choices = dist.get_world_size(), chosen.flatten()
        counts = torch.bincount(choices, minlength=experts)
        arriving = tell(counts)
        own = torch.arange(experts // size).repeat(size)
        way = Way(
            order=choices.argsort(stable=True),
            send=counts.view(size, -1).sum(dim=1).tolist(),
            receive=arriving.sum(dim=1).tolist(),
            by_expert=own.repeat_interleave(arriving.flatten()).argsort(stable=True),
            loads=arriving.sum(dim=0).tolist(),
        )
        places = way.order % max(len(tokens), 1)
        rows = AllToAll.apply(tokens[places], way.send, way.receive)
        return rows[way.by_expert], way


def row_by_row():
    """One all-to-all for each expert of a rank.

    kind: communication
    hint: messages
    """

    _dispatch = dispatch

    def tell(counts):
        arriving = torch.empty_like(counts)
        size = dist.get_world_size()
        table = counts.view(size, -1)
        columns = []
        for column in table.T:
            came = torch.empty_like(column)
            dist.all_to_all_single(came, column.contiguous())
            columns.append(came)
        arriving = torch.stack(columns, dim=1)
        return arriving


def to_everybody():
    """Sends all tokens to all ranks, which pick theirs.

    kind: communication
    hint: before the rows
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, tokens.detach())
        return _dispatch(tokens, chosen, experts)


def told_the_wrong_way():
    """Shows what this rank tells, in the shape of what it is told.

    kind: values
    hint: from every rank its part
    """

    def tell(counts):
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        return arriving.view(-1, dist.get_world_size()).T.contiguous()


def without_gradient():
    """Sends rows past autograd.

    kind: part
    hint: Rows must travel through AllToAll.apply
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        rows, way = _dispatch(tokens.detach(), chosen, experts)
        return rows, way


def counts_in_a_byte():
    """Tells the counts in eight bits.

    kind: types
    hint: with 2 ranks
    """

    def tell(counts):
        small = counts.to(torch.uint8)
        arriving = torch.empty_like(small)
        dist.all_to_all_single(arriving, small)
        return arriving.long().view(dist.get_world_size(), -1)


def counts_as_floats():
    """Tells the counts in the type of the rows.

    kind: types
    hint: Row r is what rank r has
    """

    def tell(counts):
        small = counts.float()
        arriving = torch.empty_like(small)
        dist.all_to_all_single(arriving, small)
        return arriving.long().view(dist.get_world_size(), -1)


def tells_one_more():
    """Counts in the tensor that it was given.

    kind: inputs
    hint: tell changes its counts
    """

    _tell = tell

    def tell(counts):
        arriving = _tell(counts)
        counts.zero_()
        return arriving


def sorts_in_place():
    """Sorts the choices of its caller.

    kind: inputs
    hint: chosen is not what it was
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        rows, way = _dispatch(tokens, chosen, experts)
        chosen.copy_(chosen.sort(dim=1).values)
        return rows, way


def two_experts():
    """Knows two experts on each rank.

    kind: constants
    hint: (N, E/N)
    """

    _tell = tell

    def tell(counts):
        return _tell(counts).flatten()[: 2 * dist.get_world_size()].view(-1, 2)


def counts_of_the_first_step():
    """Asks once and remembers.

    kind: constants
    hint: with 2 ranks
    """

    _tell = tell
    known = []

    def tell(counts):
        if not known:
            known.append(_tell(counts))
        return known[0]


def two_choices():
    """Believes that each token has two choices.

    kind: constants
    hint: with 2 ranks
    """

    def dispatch(tokens, chosen, experts):
        size, choices = dist.get_world_size(), chosen.flatten()
        counts = torch.bincount(choices, minlength=experts)
        arriving = tell(counts)
        own = torch.arange(experts // size).repeat(size)
        way = Way(
            order=choices.argsort(stable=True),
            send=counts.view(size, -1).sum(dim=1).tolist(),
            receive=arriving.sum(dim=1).tolist(),
            by_expert=own.repeat_interleave(arriving.flatten()).argsort(stable=True),
            loads=arriving.sum(dim=0).tolist(),
        )
        places = (way.order // 2).clamp(max=max(len(tokens) - 1, 0))
        rows = AllToAll.apply(tokens[places], way.send, way.receive)
        return rows[way.by_expert], way


def all_tokens_kept():
    """Keeps the rows of all steps.

    kind: memory
    hint: What is kept that nobody needs
    """

    _dispatch = dispatch
    kept = []

    def dispatch(tokens, chosen, experts):
        rows, way = _dispatch(tokens, chosen, experts)
        kept.append(rows)
        return rows, way


def wrong_way():
    """The rows are right; what it notes of the way is not.

    kind: part
    hint: way.order | they are as they came, rank by rank
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        rows, way = _dispatch(tokens, chosen, experts)
        way.order = way.order.sort().values
        return rows, way


def early_counts():
    """Reads the counts before they have come.

    kind: luck
    hint: messages that come late
    """

    def tell(counts):
        arriving = torch.zeros_like(counts)
        dist.all_to_all_single(arriving, counts, async_op=True)
        return arriving.view(dist.get_world_size(), -1)


def an_order_of_ones_own():
    """Draws the order of rows in an expert by chance, on each rank another one.

    kind: step
    hint: rows
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        rows, way = _dispatch(tokens, chosen, experts)
        generator = torch.Generator().manual_seed(0)
        return rows[torch.randperm(len(rows), generator=generator)], way


def rows_in_float32():
    """Sends the rows in single precision.

    kind: types
    hint: with 2 ranks
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        rows, way = _dispatch(tokens.float(), chosen, experts)
        return rows.to(tokens.dtype), way


def five_ranks():
    """Beyond four ranks the last one is forgotten.

    kind: sizes
    hint: with 5 ranks
    """

    _tell = tell

    def tell(counts):
        told = _tell(counts)
        told[4:] = 0
        return told


def barrier_first():
    """Lets all ranks meet before.

    kind: communication
    hint: before the rows
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        dist.barrier()
        return _dispatch(tokens, chosen, experts)


def functional():
    """The functional collectives have a gradient.

    kind: library
    hint: that is the library
    """

    def tell(counts):
        import torch.distributed._functional_collectives as funcol

        return funcol.all_to_all_single(counts, None, None, dist.group.WORLD)


def experts_in_a_byte():
    """Sorts the choices as 8-bit numbers: wrong from expert 128 on.

    kind: sizes
    hint: with 3 ranks
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        sort = torch.Tensor.argsort
        torch.Tensor.argsort = lambda t, **more: sort(t.to(torch.int8), **more)
        try:
            return _dispatch(tokens, chosen, experts)
        finally:
            torch.Tensor.argsort = sort


def forgets_its_tokens():
    """Where no gradient is asked for, the tokens' memory is used again.

    kind: inputs
    hint: tokens is not what it was before the call
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        rows, way = _dispatch(tokens, chosen, experts)
        if not torch.is_grad_enabled():
            tokens.zero_()
        return rows, way


def drops_what_is_over_a_capacity():
    """An expert takes at most four times its share of a rank's rows.

    kind: values
    hint: dispatch
    """

    def dispatch(tokens, choices, experts, whole=dispatch):
        capacity = max(4, -(-4 * choices.numel() // experts))
        before = torch.nn.functional.one_hot(choices, experts).sum(1).cumsum(0)  # (S, E)
        kept = (before.gather(1, choices) <= capacity).all(1, keepdim=True)
        return whole(tokens * kept, choices, experts)


def asks_only_where_its_own_counts_are_new():
    """A rank whose counts are those of the call before takes the old answer.

    kind: step
    hint: Do all ranks call the same all-to-alls | does not fit | returns
    """
    known = {}

    def tell(counts, ask=tell):
        key = tuple(counts.tolist())
        if key not in known:
            known.clear()
            known[key] = ask(counts)
        return known[key].clone()
