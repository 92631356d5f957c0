"""Exercises 04b and 04c: which layers should be recomputed, if memory is limited?

    layers = measure_layers(network(), x)     # given, in network.py
    peak_bytes(layers, {2, 5})                # bytes, if layers 2 and 5 are recomputed
    choose(layers, 1_000_000)                 # the set with the least work that fits

A layer has three numbers (`network.Layer`):

    input_bytes    its input, which it always keeps
    inside_bytes   everything else that it saves for its backward pass
    flops          the cost of running it once more

Write the two functions below.
"""

from itertools import combinations

from labs.support.activation_checkpointing.network import Layer


def peak_bytes(layers: list[Layer], recomputed: set[int]) -> int:
    """The most bytes of activations at any moment of a forward and backward pass.

    Two kinds of moments count. When the forward pass ends, every layer holds its input, and those
    that are not recomputed hold their inside. When the backward pass recomputes a layer, its own
    inside is in memory as well, but later layers have already been released.
    """
    ### BEGIN SOLUTION: the largest of these moments, in bytes
    held, peak = 0, 0  # held: by the layers up to here, when the forward pass has ended
    for index, layer in enumerate(layers):
        held += layer.input_bytes
        peak = max(peak, held + layer.inside_bytes)  # the backward pass arrives at this layer
        if index not in recomputed:
            held += layer.inside_bytes
    return max(peak, held)
    ### END SOLUTION


def choose(layers: list[Layer], budget: int) -> set[int]:
    """The layers to recompute: peak_bytes at most `budget`, with the fewest FLOPs of all such sets.

    At most 12 layers. Raises ValueError, naming the smallest possible budget, if no set fits.
    """
    ### BEGIN SOLUTION: return the set with the least work that fits, or raise ValueError
    numbers = range(len(layers))
    sets = [
        set(chosen) for size in range(len(layers) + 1) for chosen in combinations(numbers, size)
    ]
    peaks = [peak_bytes(layers, chosen) for chosen in sets]
    fitting = [chosen for chosen, peak in zip(sets, peaks) if peak <= budget]
    if not fitting:
        raise ValueError(f"budget {budget} is below the smallest possible one, {min(peaks)}")
    return min(fitting, key=lambda chosen: sum(layers[index].flops for index in chosen))
    ### END SOLUTION
