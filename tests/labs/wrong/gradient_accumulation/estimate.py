"""Lab 02, estimate: each body, written after the solution, is a wrong answer."""


def big_is_the_signal():
    """Takes the large batch's norm for the true one.

    hint: Put your two results back
    """

    def signal_and_noise(small, big, small_rows, big_rows):
        return big, (small - big) * small_rows


def last_step_only():
    """Looks at the last step alone.

    hint: Average the signal and the noise
    """

    solution = noise_scale

    def noise_scale(history, small_rows, big_rows):
        return solution(history[-1:], small_rows, big_rows)


def mean_of_ratios():
    """Divides in each step and averages the ratios.

    hint: divide last
    """

    def noise_scale(history, small_rows, big_rows):
        ratios = []
        for small, big in history:
            signal, noise = signal_and_noise(small, big, small_rows, big_rows)
            ratios.append(noise / signal)
        return sum(ratios) / len(ratios)


def rows_swapped():
    """Takes the small batch for the large one.

    hint: Put your two results back
    """

    def signal_and_noise(small, big, small_rows, big_rows):
        noise = (small - big) / (1 / big_rows - 1 / small_rows)
        return big - noise / big_rows, noise


def upside_down():
    """Signal over noise.

    hint: divide last
    """

    solution = noise_scale

    def noise_scale(history, small_rows, big_rows):
        return 1 / solution(history, small_rows, big_rows)
