"""Sends the results back expert by expert, not rank by rank.

hint: Undo the steps of dispatch
"""


def combine(results, weights, way):
    rows = AllToAll.apply(results, way.receive, way.send)  # noqa: F821
    choices = rows[way.order.argsort()].unflatten(0, weights.shape)
    return (weights[..., None] * choices).sum(dim=1)
