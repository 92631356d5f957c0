"""Looks at the end of the forward pass only.

hint: the peak may come later, in a recomputation
"""


def peak_bytes(layers, recomputed):
    inside = sum(layer.inside_bytes for i, layer in enumerate(layers) if i not in recomputed)
    return inside + sum(layer.input_bytes for layer in layers)
