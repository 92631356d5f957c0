"""Sends every number as a message of its own.

hint: messages where a ring sends
"""


def ring_all_reduce(tensor):
    flat = tensor.view(-1)
    for place in range(len(flat)):
        travelling = flat[place : place + 1].clone()
        for _ in range(dist.get_world_size() - 1):  # noqa: F821
            received = travelling.clone()
            exchange(travelling, received)  # noqa: F821
            flat[place] += received[0]
            travelling = received
