"""One all-to-all for each expert of a rank.

hint: messages
"""

_dispatch = dispatch  # noqa: F821


def tell(counts):
    arriving = torch.empty_like(counts)  # noqa: F821
    size = dist.get_world_size()  # noqa: F821
    table = counts.view(size, -1)
    columns = []
    for column in table.T:
        came = torch.empty_like(column)  # noqa: F821
        dist.all_to_all_single(came, column.contiguous())  # noqa: F821
        columns.append(came)
    arriving = torch.stack(columns, dim=1)  # noqa: F821
    return arriving
