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
    raise NotImplementedError("the largest of these moments, in bytes")


def choose(layers: list[Layer], budget: int) -> set[int]:
    """The layers to recompute: peak_bytes at most `budget`, with the fewest FLOPs of all such sets.

    At most 12 layers. Raises ValueError, naming the smallest possible budget, if no set fits.
    """
    raise NotImplementedError("return the set with the least work that fits, or raise ValueError")
