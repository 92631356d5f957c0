"""Divides in each step and averages the ratios.

hint: divide last
"""


def noise_scale(history, small_rows, big_rows):
    ratios = []
    for small, big in history:
        signal, noise = signal_and_noise(small, big, small_rows, big_rows)  # noqa: F821
        ratios.append(noise / signal)
    return sum(ratios) / len(ratios)
