"""Lab 04, choose: each body, written after the solution, is a wrong answer."""


def best_ratio_first():
    """Takes the layer with the most bytes for a FLOP until it fits: good, but not the best.

    hint: fits too and costs
    """

    def choose(layers, budget):
        chosen = set()
        for index in sorted(
            range(len(layers)), key=lambda i: -layers[i].inside_bytes / layers[i].flops
        ):
            if peak_bytes(layers, chosen) <= budget:
                break
            chosen.add(index)
        return chosen


def error_without_a_number():
    """Says that it is impossible, but not what would be possible.

    hint: does not name the smallest possible budget
    """

    solved = choose

    def choose(layers, budget):
        try:
            return solved(layers, budget)
        except ValueError:
            raise ValueError("the budget is too small") from None


def everything():
    """Recomputes every layer.

    hint: it fits without recomputing it
    """

    def choose(layers, budget):
        return set(range(len(layers)))


def fewest_layers():
    """Recomputes as few layers as possible, however much they compute.

    hint: fits too and costs
    """

    def choose(layers, budget):
        numbers = range(len(layers))
        for size in range(len(layers) + 1):
            for chosen in combinations(numbers, size):
                if peak_bytes(layers, set(chosen)) <= budget:
                    return set(chosen)


def first_layers():
    """Takes the first layers until it fits.

    hint: fits too and costs
    """

    def choose(layers, budget):
        for size in range(len(layers) + 1):
            if peak_bytes(layers, set(range(size))) <= budget:
                return set(range(size))


def ignores_the_inputs():
    """Takes recomputed layers for free.

    hint: above the budget of
    """

    def peak_bytes(layers, recomputed):
        return sum(
            x.inside_bytes + x.input_bytes for i, x in enumerate(layers) if i not in recomputed
        )


def ignores_the_teeth():
    """Counts the end of the forward pass only.

    hint: the peak is where a layer is recomputed
    """

    def peak_bytes(layers, recomputed):
        inside = sum(layer.inside_bytes for i, layer in enumerate(layers) if i not in recomputed)
        return inside + sum(layer.input_bytes for layer in layers)


def impossible_without_a_word():
    """Does what it can when nothing fits.

    hint: is impossible, but choose returns
    """

    solved = choose

    def choose(layers, budget):
        try:
            return solved(layers, budget)
        except ValueError:
            return set(range(len(layers)))


def largest_first():
    """Takes the layer with the most bytes until it fits.

    hint: fits too and costs
    """

    def choose(layers, budget):
        chosen = set()
        for index in sorted(range(len(layers)), key=lambda i: -layers[i].inside_bytes):
            if peak_bytes(layers, chosen) <= budget:
                break
            chosen.add(index)
        return chosen


def least_memory():
    """Of all sets that fit, takes the one with the least memory.

    hint: it fits without recomputing it
    """

    def choose(layers, budget):
        numbers = range(len(layers))
        sets = [set(c) for n in range(len(layers) + 1) for c in combinations(numbers, n)]
        return min(reversed(sets), key=lambda chosen: peak_bytes(layers, chosen))


def nothing():
    """Recomputes nothing.

    hint: above the budget of
    """

    def choose(layers, budget):
        return set()
