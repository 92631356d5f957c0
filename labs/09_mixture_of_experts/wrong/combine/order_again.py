"""Applies the order once more in place of undoing it.

hint: the layer's outputs are not one rank's
"""


def combine(results, weights, way):
    arrived = results[way.by_expert.argsort()]
    rows = AllToAll.apply(arrived, way.receive, way.send)  # noqa: F821
    return (weights[..., None] * rows[way.order].unflatten(0, weights.shape)).sum(dim=1)
