"""Exercise 15b: outlier channels, and what to do about them before quantization.

    seen = observe(block, inputs)             # how large does each channel get, after each norm?
    channels = outliers(seen["input_layernorm"])
    smooth(block, seen)                       # the same function, easier to round

A block (utils/models/gpt.py) has two norms, and each passes its output, (B, T, C), to several
linear layers at once: READERS, {norm: [names of the layers that read it]};
`block.get_submodule(name)` returns each. The scale of that output is set by its largest channel,
and few steps are left for the others. Dividing a channel of the norm's weight by a factor, and
multiplying the columns of all matrices that read it by the same factor, does not change what the
block computes: it moves the difficulty from the activations, which have one scale, to the weights,
which have one per output (SmoothQuant, Xiao et al., arXiv:2211.10438).
"""

import torch

from labs.support.compression.blocks import READERS, run


def observe(block, inputs):
    """{norm: (C,)}: the largest magnitude of each channel in the outputs of the two norms.

    inputs   the hidden states that enter the block, tensors (B, T, C); an iterable, possibly a
             generator. `run(block, x)` computes the block, positions 0 … T-1
    Returns fp32 for any type of block; afterwards the block is unchanged: no hook, no gradient.
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
    """Change the block's parameters in place without changing the function that it computes.

    seen   as `observe` returns it. With X_j the largest magnitude of channel j there, and W_j that
           of column j in all matrices that read it, divide the norm's weight by

               s_j = X_j^alpha / W_j^(1 - alpha)

           and multiply the columns by it. (A factor common to all s of a norm is your choice, and
           each s may be rounded to a power of two, which preserves the function bit for bit.) If
           X_j or W_j is 0, any positive s is fine.
    Compute s at least in fp32. Biases and all other parameters are not changed.
    """
    raise NotImplementedError(
        "compute s for each norm; divide the norm by it, multiply all its readers"
    )
