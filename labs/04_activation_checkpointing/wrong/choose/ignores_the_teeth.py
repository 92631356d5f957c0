"""Counts the end of the forward pass only.

hint: the peak is where a layer is recomputed
"""


def peak_bytes(layers, recomputed):
    inside = sum(layer.inside_bytes for i, layer in enumerate(layers) if i not in recomputed)
    return inside + sum(layer.input_bytes for layer in layers)
