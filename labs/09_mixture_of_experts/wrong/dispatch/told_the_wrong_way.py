"""Shows what this rank tells, in the shape of what it is told.

hint: from every rank its part
"""


def tell(counts):
    arriving = torch.empty_like(counts)  # noqa: F821
    dist.all_to_all_single(arriving, counts)  # noqa: F821
    return arriving.view(-1, dist.get_world_size()).T.contiguous()  # noqa: F821
