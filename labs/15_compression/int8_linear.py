"""Exercise 15a: a linear layer that computes in whole numbers.

    scale = calibrate(batches)                # once: how large do its inputs get?
    layer = Int8Linear(linear, scale)         # W becomes int8, one scale for each output
    y = layer(x)                              # int8 × int8, sums in int32, then the scales

Symmetric, 8 bits: q = round(w / scale), between -127 and 127; what would lie outside goes to the
end of that range. So w ≈ scale · q. K inputs, two at least, N outputs; a linear layer's weight is
(N, K).
"""

import torch
from torch import nn

HIGHEST = 127


def calibrate(batches, percentile=100.0):
    """The scale of activations, from batches of them, tensors (..., K) of floats.

    Step 127 is the smallest magnitude that at least `percentile` percent of all numbers in all
    batches do not exceed: at 100, the largest. (Its neighbour among the magnitudes, or a value
    between the two, will do as well.) Where that is 0, any positive scale is right.
    batches may be a generator, which can be gone through once; one batch has a number at least.
    At 100 no batch is kept while others come. Returns an fp32 tensor of one number.
    """
    raise NotImplementedError("find the magnitude over all batches, and divide it by HIGHEST")


class Int8Linear(nn.Module):
    """y = x Wᵀ + bias, with x and W in int8.

    linear   the nn.Linear that it stands for, of any float type; it may have no bias. Afterwards
             the layer does without it: no float copy of W lives on
    scale    of the activations, as `calibrate` returns it; W has one for each output, from the
             largest magnitude of its row (any positive one where all are 0)

    What a call needs lies in the layer's state_dict: load_state_dict of another layer's makes it
    that other layer. Bytes: 1 for each number of W, 4 for each scale, and the bias.
    """

    def __init__(self, linear, scale):
        super().__init__()
        raise NotImplementedError("buffers for W in int8, its scales, the scale of x, the bias")

    @torch.no_grad()
    def forward(self, x):
        """x (..., K), any number of dimensions and rows -> y (..., N), of x's type.

        x / scale, rounded and clamped, is multiplied with W as int8 × int8, with sums in int32;
        then come the two scales and the bias, in fp32. No product of floats, and nothing as large
        as W is made.
        """
        raise NotImplementedError("x to int8, torch._int_mm with W, then scales and bias")
