"""Signal over noise.

hint: divide last
"""

solution = noise_scale  # noqa: F821


def noise_scale(history, small_rows, big_rows):
    return 1 / solution(history, small_rows, big_rows)
