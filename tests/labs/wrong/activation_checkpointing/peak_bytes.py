"""Lab 04, peak_bytes: each body, written after the solution, is a wrong answer."""


def end_of_forward():
    """Looks at the end of the forward pass only.

    hint: the peak may come later, in a recomputation
    """

    def peak_bytes(layers, recomputed):
        inside = sum(layer.inside_bytes for i, layer in enumerate(layers) if i not in recomputed)
        return inside + sum(layer.input_bytes for layer in layers)


def inputs_forgotten():
    """A recomputed layer keeps nothing, in this count.

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

    hint: a real pass has
    """

    def peak_bytes(layers, recomputed):
        return sum(layer.input_bytes + layer.inside_bytes for layer in layers)


def tooth_on_top():
    """Puts the largest recomputed layer on top of everything.

    hint: the layers behind it have been released already
    """

    def peak_bytes(layers, recomputed):
        inside = sum(layer.inside_bytes for i, layer in enumerate(layers) if i not in recomputed)
        tooth = max((layers[i].inside_bytes for i in recomputed), default=0)
        return inside + sum(layer.input_bytes for layer in layers) + tooth
