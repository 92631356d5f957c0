"""Returns no gradient.

hint: no gradient comes back to the rows
"""


class AllToAll(AllToAll):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        return None, None, None
