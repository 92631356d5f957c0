"""Puts the largest recomputed layer on top of everything.

hint: the layers behind it have been released already
"""


def peak_bytes(layers, recomputed):
    inside = sum(layer.inside_bytes for i, layer in enumerate(layers) if i not in recomputed)
    tooth = max((layers[i].inside_bytes for i in recomputed), default=0)
    return inside + sum(layer.input_bytes for layer in layers) + tooth
