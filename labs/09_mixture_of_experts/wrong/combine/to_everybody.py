"""Every rank gets the results of all, and takes its own.

hint: Each row goes to one rank only
"""

_combine = combine  # noqa: F821


def combine(results, weights, way):
    everything = [None] * dist.get_world_size()  # noqa: F821
    dist.all_gather_object(everything, results.detach())  # noqa: F821
    return _combine(results, weights, way)
