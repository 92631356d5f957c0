"""Weighs with copies of the weights.

hint: Does the router get a gradient
"""

_combine = combine  # noqa: F821


def combine(results, weights, way):
    return _combine(results, weights.detach(), way)
