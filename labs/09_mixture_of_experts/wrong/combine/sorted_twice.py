"""Sorts by expert again in place of undoing it.

hint: Undo the steps of dispatch
"""


def combine(results, weights, way):
    rows = AllToAll.apply(results[way.by_expert], way.receive, way.send)  # noqa: F821
    choices = rows[way.order.argsort()].unflatten(0, weights.shape)
    return (weights[..., None] * choices).sum(dim=1)
