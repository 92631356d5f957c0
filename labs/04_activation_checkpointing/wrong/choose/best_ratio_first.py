"""Takes the layer with the most bytes for a FLOP until it fits: good, but not the best.

hint: fits too and costs
"""


def choose(layers, budget):
    chosen = set()
    for index in sorted(
        range(len(layers)), key=lambda i: -layers[i].inside_bytes / layers[i].flops
    ):
        if peak_bytes(layers, chosen) <= budget:  # noqa: F821
            break
        chosen.add(index)
    return chosen
