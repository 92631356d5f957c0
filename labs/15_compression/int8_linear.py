"""Exercise 15a: a linear layer that computes in integers.

    scale = calibrate(batches)                # once: how large do its inputs get?
    layer = Int8Linear(linear, scale)         # W becomes int8, with one scale per output
    y = layer(x)                              # int8 × int8, sums in int32, then the scales

Symmetric, 8 bits: q = round(w / scale), clamped to -127 … 127. So w ≈ scale · q. K inputs, at least
two, and N outputs; a linear layer's weight is (N, K).
"""

import torch
from torch import nn

HIGHEST = 127


def calibrate(batches, percentile=100.0):
    """The scale of activations, from batches of them, tensors (..., K) of floats.

    Step 127 is the smallest magnitude that at least `percentile` percent of all values in all
    batches do not exceed: at 100, the largest. (Its neighbour among the magnitudes, or a value
    between the two, is accepted too.) If that is 0, any positive scale is right.
    batches may be a generator, which can be iterated over once; at least one batch is not empty.
    At 100 no batch is kept while others follow. Returns a scalar fp32 tensor.
    """
    raise NotImplementedError("find the magnitude over all batches, and divide it by HIGHEST")


class Int8Linear(nn.Module):
    """y = x Wᵀ + bias, with x and W in int8.

    linear   the nn.Linear that it replaces, of any float type; it may have no bias. Afterwards the
             layer does not need it: no float copy of W is kept
    scale    of the activations, as `calibrate` returns it; W has one per output, from the largest
             magnitude of its row (any positive one if all are 0)

    All that a call needs is in the layer's state_dict: after load_state_dict of another layer's, it
    computes the same as that layer. Bytes: 1 per element of W, 4 per scale, and the bias.
    """

    def __init__(self, linear, scale):
        super().__init__()
        raise NotImplementedError("buffers for W in int8, its scales, the scale of x, the bias")

    @torch.no_grad()
    def forward(self, x):
        """x (..., K), any number of dimensions and rows -> y (..., N), of x's type.

        x / scale, rounded and clamped, is multiplied by W as int8 × int8, with sums in int32; then
        the two scales and the bias are applied in fp32. No matrix product of floats is computed,
        and no tensor as large as W is made.
        """
        raise NotImplementedError("x to int8, torch._int_mm with W, then scales and bias")
