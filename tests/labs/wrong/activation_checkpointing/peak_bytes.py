"""Lab 04, peak_bytes: each body, written after the solution, is a wrong answer."""


def end_of_forward():
    """Looks at the end of the forward pass only.

    kind: part
    hint: the peak may come later, in a recomputation
    """

    def peak_bytes(layers, recomputed):
        inside = sum(layer.inside_bytes for i, layer in enumerate(layers) if i not in recomputed)
        return inside + sum(layer.input_bytes for layer in layers)


def inputs_forgotten():
    """A recomputed layer keeps nothing, in this count.

    kind: memory
    hint: Does every layer hold its input, and a kept one its inside too?
    """

    def peak_bytes(layers, recomputed):
        held, peak = 0, 0
        for index, layer in enumerate(layers):
            size = layer.input_bytes + layer.inside_bytes
            peak = max(peak, held + size)
            held += 0 if index in recomputed else size
        return peak


def nothing_saved():
    """Takes recomputed layers for kept ones.

    kind: values
    hint: a real pass has
    """

    def peak_bytes(layers, recomputed):
        return sum(layer.input_bytes + layer.inside_bytes for layer in layers)


def tooth_on_top():
    """Puts the largest recomputed layer on top of everything.

    kind: values
    hint: the layers behind it have been released already
    """

    def peak_bytes(layers, recomputed):
        inside = sum(layer.inside_bytes for i, layer in enumerate(layers) if i not in recomputed)
        tooth = max((layers[i].inside_bytes for i in recomputed), default=0)
        return inside + sum(layer.input_bytes for layer in layers) + tooth


def last_tooth():
    """Looks at the last recomputed layer only.

    kind: part
    hint: and a kept one its inside too? | a real pass has | is right
    """

    def peak_bytes(layers, recomputed):
        held = [
            x.input_bytes + (i not in recomputed) * x.inside_bytes for i, x in enumerate(layers)
        ]
        last = max(recomputed, default=0)
        return max(
            sum(held), sum(held[: last + 1]) + (last in recomputed) * layers[last].inside_bytes
        )


def eight_layers():
    """Knows eight layers.

    kind: sizes
    hint: and
    """

    solved = peak_bytes

    def peak_bytes(layers, recomputed):
        return solved(layers[:8], recomputed)


def inputs_alike():
    """Takes every input to be as large as the first one.

    kind: constants
    hint: is right
    """

    def peak_bytes(layers, recomputed):
        first, held, peak = layers[0].input_bytes, 0, 0
        for index, layer in enumerate(layers):
            held += first
            peak = max(peak, held + layer.inside_bytes)
            held += 0 if index in recomputed else layer.inside_bytes
        return max(peak, held)


def in_32_bits():
    """Adds in 32 bits.

    kind: types
    hint: is right
    """

    import torch

    def peak_bytes(layers, recomputed):
        held, peak = torch.zeros((), dtype=torch.int32), 0
        for index, layer in enumerate(layers):
            held = held + torch.tensor(layer.input_bytes).int()
            peak = max(peak, int(held + layer.inside_bytes))
            held = held + (0 if index in recomputed else layer.inside_bytes)
        return max(peak, int(held))


def in_float32():
    """Adds with 24 bits.

    kind: types
    hint: is right
    """

    import numpy as np

    def peak_bytes(layers, recomputed):
        held, peak = np.float32(0), np.float32(0)
        for index, layer in enumerate(layers):
            held = np.float32(held + layer.input_bytes)
            peak = max(peak, np.float32(held + layer.inside_bytes))
            held = np.float32(held + (0 if index in recomputed else layer.inside_bytes))
        return max(peak, held)


def with_its_unit():
    """Returns a text.

    kind: types
    hint: should be a number
    """

    solved = peak_bytes

    def peak_bytes(layers, recomputed):
        return f"{solved(layers, recomputed):,} bytes"


def empties_the_set():
    """Takes the layers out of the caller's set.

    kind: inputs
    hint: recomputed is not what it was before the call
    """

    solved = peak_bytes

    def peak_bytes(layers, recomputed):
        found = solved(layers, recomputed)
        recomputed.clear()
        return found


def of_the_check():
    """Takes the count of the check itself.

    kind: library
    hint: that is the library
    """

    from labs.support.activation_checkpointing import check_plan

    def peak_bytes(layers, recomputed):
        return check_plan._peak(layers, recomputed)


def remembers_the_set():
    """What it has found for a set it returns for every network.

    kind: constants
    hint: is right
    """

    solved, known = peak_bytes, {}

    def peak_bytes(layers, recomputed):
        key = frozenset(recomputed)
        if key not in known:
            known[key] = solved(layers, recomputed)
        return known[key]


def nothing_for_no_one():
    """Takes no recomputed layer for no work to do.

    kind: odd
    hint: every layer holds its input and its inside
    """

    solved = peak_bytes

    def peak_bytes(layers, recomputed):
        return solved(layers, recomputed) if recomputed else 0


def tooth_without_its_input():
    """Forgets the input of the layer that is recomputed.

    kind: memory
    hint: is right | a real pass has
    """

    def peak_bytes(layers, recomputed):
        held, peak = 0, 0
        for index, layer in enumerate(layers):
            peak = max(peak, held + layer.inside_bytes)
            held += layer.input_bytes
            held += 0 if index in recomputed else layer.inside_bytes
        return max(peak, held)
