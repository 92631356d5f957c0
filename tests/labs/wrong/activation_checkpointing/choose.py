"""Lab 04, choose: each body, written after the solution, is a wrong answer."""


def best_ratio_first():
    """Takes the layer with the most bytes for a FLOP until it fits: good, but not the best.

    kind: values
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

    kind: part
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

    kind: work
    hint: it fits without recomputing it
    """

    def choose(layers, budget):
        return set(range(len(layers)))


def fewest_layers():
    """Recomputes as few layers as possible, however much they compute.

    kind: values
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

    kind: values
    hint: fits too and costs
    """

    def choose(layers, budget):
        for size in range(len(layers) + 1):
            if peak_bytes(layers, set(range(size))) <= budget:
                return set(range(size))


def ignores_the_inputs():
    """Takes recomputed layers for free.

    kind: memory
    hint: above the budget of
    """

    def peak_bytes(layers, recomputed):
        return sum(
            x.inside_bytes + x.input_bytes for i, x in enumerate(layers) if i not in recomputed
        )


def ignores_the_teeth():
    """Counts the end of the forward pass only.

    kind: memory
    hint: the peak is where a layer is recomputed
    """

    def peak_bytes(layers, recomputed):
        inside = sum(layer.inside_bytes for i, layer in enumerate(layers) if i not in recomputed)
        return inside + sum(layer.input_bytes for layer in layers)


def impossible_without_a_word():
    """Does what it can when nothing fits.

    kind: odd
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

    kind: values
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

    kind: work
    hint: it fits without recomputing it
    """

    def choose(layers, budget):
        numbers = range(len(layers))
        sets = [set(c) for n in range(len(layers) + 1) for c in combinations(numbers, n)]
        return min(reversed(sets), key=lambda chosen: peak_bytes(layers, chosen))


def nothing():
    """Recomputes nothing.

    kind: memory
    hint: above the budget of
    """

    def choose(layers, budget):
        return set()


def at_most_three():
    """Tries sets of up to three layers.

    kind: sizes
    hint: although | fits too and costs
    """

    def choose(layers, budget):
        numbers = range(len(layers))
        sets = [set(c) for n in range(4) for c in combinations(numbers, n)]
        fitting = [c for c in sets if peak_bytes(layers, c) <= budget]
        if not fitting:
            least = peak_bytes(layers, set(numbers))
            raise ValueError(f"budget {budget} is below the least that is possible, {least}")
        return min(fitting, key=lambda chosen: sum(layers[i].flops for i in chosen))


def strictly_below():
    """Wants a byte to spare.

    kind: values
    hint: although | fits too and costs
    """

    solved = choose

    def choose(layers, budget):
        return solved(layers, budget - 1)


def of_the_check():
    """Takes the plan of the check itself.

    kind: library
    hint: that is the library
    """

    def choose(layers, budget):
        from labs.support.activation_checkpointing import check_plan

        return check_plan._best(layers, budget)


def remembers_by_length():
    """The plan for so many layers and so many bytes is always the same, it thinks.

    kind: constants
    hint: fits too and costs | above the budget | although
    """

    solved, plans = choose, {}

    def choose(layers, budget):
        if len(layers) not in plans:
            plans[len(layers)] = solved(layers, budget)
        return plans[len(layers)]


def empties_the_list():
    """Clears the caller's layers when it is done.

    kind: inputs
    hint: layers is not what it was before the call
    """

    solved = choose

    def choose(layers, budget):
        found = solved(layers, budget)
        layers.clear()
        return found


def a_thousand_throws():
    """Takes the best of some sets that chance names.

    kind: luck
    hint: fits too and costs | although
    """

    def choose(layers, budget):
        import random

        numbers = range(len(layers))
        sets = [{i for i in numbers if random.random() < 0.5} for _ in range(300)]
        fitting = [c for c in sets if peak_bytes(layers, c) <= budget]
        if not fitting:
            least = peak_bytes(layers, set(numbers))
            raise ValueError(f"budget {budget} is below the least that is possible, {least}")
        return min(fitting, key=lambda chosen: sum(layers[i].flops for i in chosen))


def work_in_thousands():
    """Compares whole thousands of FLOPs.

    kind: types
    hint: fits too and costs
    """

    def choose(layers, budget):
        numbers = range(len(layers))
        sets = [set(c) for n in range(len(layers) + 1) for c in combinations(numbers, n)]
        fitting = [c for c in sets if peak_bytes(layers, c) <= budget]
        if not fitting:
            least = peak_bytes(layers, set(numbers))
            raise ValueError(f"budget {budget} is below the least that is possible, {least}")
        return min(reversed(fitting), key=lambda c: sum(layers[i].flops for i in c) // 1000)


def leaves_the_program():
    """Ends the program where nothing fits.

    kind: end
    hint: the code leaves the program
    """

    solved = choose

    def choose(layers, budget):
        try:
            return solved(layers, budget)
        except ValueError as error:
            raise SystemExit(str(error)) from None


def least_without_recomputation():
    """Names what is needed when nothing is recomputed.

    kind: values
    hint: does not name the smallest possible budget
    """

    solved = choose

    def choose(layers, budget):
        try:
            return solved(layers, budget)
        except ValueError:
            raise ValueError(f"{peak_bytes(layers, set())} bytes are needed") from None
