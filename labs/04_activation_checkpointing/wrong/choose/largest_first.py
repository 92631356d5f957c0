"""Takes the layer with the most bytes until it fits.

hint: fits too and costs
"""


def choose(layers, budget):
    chosen = set()
    for index in sorted(range(len(layers)), key=lambda i: -layers[i].inside_bytes):
        if peak_bytes(layers, chosen) <= budget:  # noqa: F821
            break
        chosen.add(index)
    return chosen
