"""2(N-1) messages as it should be, but each of the whole tensor.

hint: the whole tensor,
"""


def ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()  # noqa: F821
    flat = tensor.view(-1)
    parts = flat.tensor_split(size)
    for step in range(size - 1):
        received = flat.clone()
        exchange(flat, received)  # noqa: F821
        into = (rank - step - 1) % size
        parts[into].add_(received.tensor_split(size)[into])
    for step in range(size - 1):
        received = flat.clone()
        exchange(flat, received)  # noqa: F821
        into = (rank - step) % size
        parts[into].copy_(received.tensor_split(size)[into])
