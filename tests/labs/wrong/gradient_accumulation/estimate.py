"""Lab 02, estimate: each body, written after the solution, is a wrong answer."""


def big_is_the_signal():
    """Takes the large batch's norm for the true one.

    kind: part
    hint: Put your two results back
    """

    def signal_and_noise(small, big, small_rows, big_rows):
        return big, (small - big) * small_rows


def last_step_only():
    """Looks at the last step alone.

    kind: part
    hint: Average the signal and the noise
    """

    solution = noise_scale

    def noise_scale(history, small_rows, big_rows):
        return solution(history[-1:], small_rows, big_rows)


def mean_of_ratios():
    """Divides in each step and averages the ratios.

    kind: values
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

    kind: values
    hint: Put your two results back
    """

    def signal_and_noise(small, big, small_rows, big_rows):
        noise = (small - big) / (1 / big_rows - 1 / small_rows)
        return big - noise / big_rows, noise


def upside_down():
    """Signal over noise.

    kind: values
    hint: divide last
    """

    solution = noise_scale

    def noise_scale(history, small_rows, big_rows):
        return 1 / solution(history, small_rows, big_rows)


def ends_at_a_negative_signal():
    """A signal below zero cannot be, so the program ends.

    kind: end
    hint: the code leaves the program in noise.py line
    """

    solution = signal_and_noise

    def signal_and_noise(small, big, small_rows, big_rows):
        signal, noise = solution(small, big, small_rows, big_rows)
        if signal < 0:
            raise SystemExit("no signal")
        return signal, noise


def in_fp32():
    """Averages in fp32: right to seven digits.

    kind: types
    hint: In which type is it added up | Average the signal and the noise
    """

    def noise_scale(history, small_rows, big_rows):
        small, big = torch.tensor(history).mean(0)
        signal, noise = signal_and_noise(small, big, small_rows, big_rows)
        return (noise / signal).item()


def negative_is_zero():
    """Signals below zero are left out of the average.

    kind: odd
    hint: Average the signal and the noise
    """

    def noise_scale(history, small_rows, big_rows):
        both = [signal_and_noise(*norms, small_rows, big_rows) for norms in history]
        signal = sum(max(signal, 0.0) for signal, _ in both) / len(both)
        noise = sum(noise for _, noise in both) / len(both)
        return noise / signal


def of_the_first_call():
    """The numbers of rows of the first call are kept.

    kind: constants
    hint: Put your two results back
    """

    solution, ROWS = signal_and_noise, []

    def signal_and_noise(small, big, small_rows, big_rows):
        ROWS.append((small_rows, big_rows))
        return solution(small, big, *ROWS[0])


def ratio_in_whole_numbers():
    """Takes the large batch for a whole number of small ones.

    kind: sizes
    hint: Put your two results back
    """

    def signal_and_noise(small, big, small_rows, big_rows):
        times = big_rows // small_rows
        signal = (times * big - small) / (times - 1)
        return signal, (small - signal) * small_rows


def takes_out_the_outliers():
    """Sorts the caller's history to leave the largest out.

    kind: inputs
    hint: the caller's history is not what it was
    """

    solution = noise_scale

    def noise_scale(history, small_rows, big_rows):
        history.sort()
        return solution(history, small_rows, big_rows)


def twelve_steps():
    """Divides by twelve, whatever the number of steps.

    kind: constants
    hint: Average the signal and the noise
    """

    def noise_scale(history, small_rows, big_rows):
        both = [signal_and_noise(*norms, small_rows, big_rows) for norms in history]
        signal = (sum(signal for signal, _ in both) + 1e-3) / 12
        noise = sum(noise for _, noise in both) / 12
        return noise / signal


def grows_with_each_call():
    """Adds the new steps to those of earlier calls.

    kind: step
    hint: Average the signal and the noise
    """

    solution, ALL = noise_scale, []

    def noise_scale(history, small_rows, big_rows):
        ALL.extend(history)
        return solution(ALL, small_rows, big_rows)


def never_below_zero():
    """A mean of |G|² below zero counts as next to nothing.

    kind: values
    hint: as they are
    """

    def noise_scale(history, small_rows, big_rows):
        both = [signal_and_noise(*norms, small_rows, big_rows) for norms in history]
        signal = sum(signal for signal, _ in both) / len(both)
        return sum(noise for _, noise in both) / len(both) / max(signal, 1e-12)


def last_hundred_steps():
    """Forgets all steps but the last hundred.

    kind: sizes
    hint: over all of them
    """

    solution = noise_scale

    def noise_scale(history, small_rows, big_rows):
        return solution(history[-100:], small_rows, big_rows)


def one_result_for_a_length():
    """Remembers the result for as many steps and rows.

    kind: constants
    hint: Average the signal and the noise
    """

    solution, CACHE = noise_scale, {}

    def noise_scale(history, small_rows, big_rows):
        key = len(history), small_rows, big_rows
        if key not in CACHE:
            CACHE[key] = solution(history, small_rows, big_rows)
        return CACHE[key]


def calls_itself_for_each_step():
    """Python allows a thousand calls within one another.

    kind: sizes
    hint: RecursionError in noise.py line
    """

    def sums(history, small_rows, big_rows):
        if not history:
            return 0.0, 0.0
        signal, noise = signal_and_noise(*history[0], small_rows, big_rows)
        rest = sums(history[1:], small_rows, big_rows)
        return signal + rest[0], noise + rest[1]

    def noise_scale(history, small_rows, big_rows):
        signal, noise = sums(history, small_rows, big_rows)
        return noise / signal


def averages_over_the_ranks_again():
    """The numbers are the same on all ranks already, and a rank that asks alone waits for ever.

    kind: communication
    hint: the two functions call all_reduce
    """

    def noise_scale(history, small_rows, big_rows, alone=noise_scale):
        scale = torch.tensor(alone(history, small_rows, big_rows))
        torch.distributed.all_reduce(scale)
        return scale.item() / torch.distributed.get_world_size()
