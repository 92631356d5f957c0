"""Takes the large batch's norm for the true one.

hint: Put your two results back
"""


def signal_and_noise(small, big, small_rows, big_rows):
    return big, (small - big) * small_rows
