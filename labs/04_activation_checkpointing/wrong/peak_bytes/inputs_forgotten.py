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
