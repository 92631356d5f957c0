"""Makes the weights add up to one, although the router has decided.

hint: the layer's outputs are not one rank's
"""

_combine = combine  # noqa: F821


def combine(results, weights, way):
    return _combine(results, weights / weights.sum(dim=1, keepdim=True), way)
