"""Sends the whole tensor around: N-1 times as many bytes as needed.

hint: the whole tensor,
"""


def ring_all_reduce(tensor):
    total, travelling = tensor.clone(), tensor.clone()
    for _ in range(dist.get_world_size() - 1):  # noqa: F821
        received = travelling.clone()
        exchange(travelling, received)  # noqa: F821
        total += received
        travelling = received
    tensor.copy_(total)
