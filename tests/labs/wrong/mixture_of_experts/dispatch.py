"""Lab 09, dispatch: each body, written after the solution, is a wrong answer."""


def by_rank():
    """Leaves the rows in the order in which they came.

    hint: they came rank by rank
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        rows, way = _dispatch(tokens, chosen, experts)
        return rows[way.by_expert.argsort()], way


def first_choice_only():
    """Sends each token to its first expert only.

    hint: way.loads is
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        return _dispatch(tokens, chosen[:, :1], experts)


def full_experts():
    """Drops what is more than a fair share.

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

    hint: who tells it the others'?
    """

    def tell(counts):
        return counts.view(dist.get_world_size(), -1)


def not_sorted():
    """Sends the choices in the order of the tokens.

    hint: gets rows of other tokens
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

    hint: also a rank that has nothing to send
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

    hint: Each row goes to one rank only
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, tokens.detach())
        return _dispatch(tokens, chosen, experts)


def told_the_wrong_way():
    """Shows what this rank tells, in the shape of what it is told.

    hint: from every rank its part
    """

    def tell(counts):
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        return arriving.view(-1, dist.get_world_size()).T.contiguous()


def without_gradient():
    """Sends rows past autograd.

    hint: Rows must travel through AllToAll.apply
    """

    _dispatch = dispatch

    def dispatch(tokens, chosen, experts):
        rows, way = _dispatch(tokens.detach(), chosen, experts)
        return rows, way
