"""Sends back as many rows as were sent out.

hint: Split sizes
"""


def combine(results, weights, way):
    arrived = results[way.by_expert.argsort()]
    rows = AllToAll.apply(arrived, way.send, way.receive)  # noqa: F821
    choices = rows[way.order.argsort()].unflatten(0, weights.shape)
    return (weights[..., None] * choices).sum(dim=1)
