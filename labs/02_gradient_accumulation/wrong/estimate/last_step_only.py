"""Looks at the last step alone.

hint: Average the signal and the noise
"""

solution = noise_scale  # noqa: F821


def noise_scale(history, small_rows, big_rows):
    return solution(history[-1:], small_rows, big_rows)
