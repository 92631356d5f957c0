"""Takes the small batch for the large one.

hint: Put your two results back
"""


def signal_and_noise(small, big, small_rows, big_rows):
    noise = (small - big) / (1 / big_rows - 1 / small_rows)
    return big - noise / big_rows, noise
