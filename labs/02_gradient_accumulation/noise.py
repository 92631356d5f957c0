"""Exercise 02c: the gradient noise scale, measured for free while training.

    small, big = squared_norms(gradient)             # at each step, on every rank
    history.append((small, big))
    noise_scale(history, small_rows, big_rows)       # now and then

Every rank has the mean gradient of its own rows. Before the all-reduce it is that of a small batch,
afterwards that of a large one; both estimate the same true gradient, with different noise. Write
the three functions.
Source: McCandlish et al. 2018, arXiv 1812.06162, appendix A.1.
"""

import torch
import torch.distributed as dist


def squared_norms(gradient: torch.Tensor) -> tuple[float, float]:
    """Replace `gradient` by its mean over the ranks, in place, and measure both norms.

    gradient: 1-D, fp32 or fp64, this rank's mean over its own rows; it may be a view of a larger
    tensor. A NaN on one rank is a NaN in the mean and in both norms.
    Returns (small, big), the same on every rank: the mean over the ranks of |gradient of one
    rank|², and |mean gradient|². One all-reduce for everything, one element longer than `gradient`.
    """
    raise NotImplementedError(
        "append |gradient|² to the gradient, all-reduce both as one, take the means"
    )


def signal_and_noise(
    small: float, big: float, small_rows: int, big_rows: int
) -> tuple[float, float]:
    """(|G|², tr Σ) from the squared norms of gradients of `small_rows` and `big_rows` rows.

    They solve small = |G|² + trΣ / small_rows and big = |G|² + trΣ / big_rows.
    """
    raise NotImplementedError("solve the two equations of the docstring for the two unknowns")


def noise_scale(history: list[tuple[float, float]], small_rows: int, big_rows: int) -> float:
    """B_noise = trΣ / |G|² from the (small, big) of many steps.

    Both are very noisy in a single step, and |G|² may even be negative. First average each over all
    steps, as they are, and divide last: if even the average of |G|² is negative, so is the result.
    `history` is not changed; a run has thousands of steps.
    """
    raise NotImplementedError("average signal and noise over the steps separately; then divide")
