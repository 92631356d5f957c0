"""Adds the results up without their weights.

hint: weigh each with its weight
"""

_combine = combine  # noqa: F821


def combine(results, weights, way):
    return _combine(results, torch.ones_like(weights), way)  # noqa: F821
