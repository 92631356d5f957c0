"""A rank without micro-batches does not take part: the others wait for it.

hint: Do all ranks call the all-reduce
"""

solution = reduce_once  # noqa: F821


def reduce_once(model, losses, tokens):
    if tokens == 0:
        return 0.0
    return solution(model, losses, tokens)
