"""Takes the mean of a token's results.

hint: This is the mean of the results
"""

_combine = combine  # noqa: F821


def combine(results, weights, way):
    return _combine(results, torch.ones_like(weights) / weights.shape[1], way)  # noqa: F821
