"""Exercise 15b: outlier channels, and what to do about them before quantization.

    seen = observe(block, inputs)             # how large does each channel get, after each norm?
    channels = outliers(seen["input_layernorm"])
    smooth(block, seen)                       # the same function, easier to round

A block (utils/models/gpt.py) has two norms, and each hands its output, (B, T, C), to several
linear layers at once: READERS, {norm: [names of the layers that read it]}, of which
`block.get_submodule(name)` gives each. The scale of that output is set by its largest channel, and
few steps are left for the others. What a channel is divided by in the norm's weight, and multiplied
with in the columns of all matrices that read it, changes nothing in what the block computes: it
moves the difficulty from the activations, which have one scale, to the weights, which have one for
each output (SmoothQuant, Xiao et al., arXiv:2211.10438).
"""

import torch

from labs.support.compression.blocks import READERS, run


def observe(block, inputs):
    """{norm: (C,)}: the largest magnitude of each channel in what the two norms hand on.

    inputs   the hidden states that come into the block, tensors (B, T, C); an iterable, which may
             be a generator. `run(block, x)` computes the block, positions 0 … T-1
    fp32, whatever the block is; the block is as before afterwards: no hook, no gradient.
    """
    raise NotImplementedError(
        "the maximum over all inputs, rows and positions, for each norm and channel"
    )


def outliers(largest, times=8.0):
    """The channels whose largest magnitude is more than `times` the median: a sorted list of ints.

    largest  (C,); channels that are always 0 do not count for the median
    """
    raise NotImplementedError("compare each channel with the median of those that are not 0")


def smooth(block, seen, alpha=0.5):
    """Changes the block's parameters in place; the function that it computes stays.

    seen   as `observe` returns it. With X_j the largest magnitude of channel j there, and W_j that
           of column j in all matrices that read it,

               s_j = X_j^alpha / W_j^(1 - alpha)

           goes out of the norm's weight and into the columns. (A factor that all s of a norm share
           is yours to choose, and each s may be rounded to a power of two, after which the
           function stays to the bit.) Where X_j or W_j is 0, any positive s will do.
    s is found in fp32 at least. Biases and all other parameters stay as they are.
    """
    raise NotImplementedError("s for each norm, out of the norm, into all its readers")
