"""Takes the place of a choice for the number of a token.

hint: A row is tokens[place // k]
"""


def dispatch(tokens, chosen, experts):
    size, choices = dist.get_world_size(), chosen.flatten()  # noqa: F821
    counts = torch.bincount(choices, minlength=experts)  # noqa: F821
    arriving = tell(counts)  # noqa: F821
    own = torch.arange(experts // size).repeat(size)  # noqa: F821
    way = Way(  # noqa: F821
        order=choices.argsort(stable=True),
        send=counts.view(size, -1).sum(dim=1).tolist(),
        receive=arriving.sum(dim=1).tolist(),
        by_expert=own.repeat_interleave(arriving.flatten()).argsort(stable=True),
        loads=arriving.sum(dim=0).tolist(),
    )
    places = way.order % max(len(tokens), 1)
    rows = AllToAll.apply(tokens[places], way.send, way.receive)  # noqa: F821
    return rows[way.by_expert], way
