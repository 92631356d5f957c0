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
    ### BEGIN SOLUTION: find the magnitude over all batches, and divide it by HIGHEST
    if percentile == 100:
        largest = torch.tensor(0.0)
        for x in batches:
            if x.numel():
                largest = torch.maximum(largest, x.abs().max().float())
    else:
        sizes = torch.cat([x.float().abs().flatten() for x in batches]).sort().values
        place = -(-len(sizes) * percentile // 100)  # rounded up
        largest = sizes[max(int(place) - 1, 0)].clone()
    scale = largest / HIGHEST
    return scale.where(scale > 0, 1.0)
    ### END SOLUTION


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
        ### BEGIN SOLUTION: buffers for W in int8, its scales, the scale of x, the bias
        weight = linear.weight.detach().float()  # (N, K)
        scales = weight.abs().amax(dim=1, keepdim=True) / HIGHEST
        scales = scales.where(scales > 0, 1.0)
        values = (weight / scales).round().clamp(-HIGHEST, HIGHEST)
        self.register_buffer("weight", values.to(torch.int8))  # (N, K)
        self.register_buffer("weight_scale", scales.squeeze(1))  # (N,)
        self.register_buffer("scale", scale.clone())
        bias = linear.bias
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        ### END SOLUTION

    @torch.no_grad()
    def forward(self, x):
        """x (..., K), any number of dimensions and rows -> y (..., N), of x's type.

        x / scale, rounded and clamped, is multiplied by W as int8 × int8, with sums in int32; then
        the two scales and the bias are applied in fp32. No matrix product of floats is computed,
        and no tensor as large as W is made.
        """
        ### BEGIN SOLUTION: x to int8, torch._int_mm with W, then scales and bias
        rows = x.reshape(-1, x.shape[-1]).float()  # (M, K)
        values = (rows / self.scale).round().clamp(-HIGHEST, HIGHEST).to(torch.int8)
        sums = torch._int_mm(values, self.weight.T)  # int32 (M, N)
        y = sums.float() * (self.scale * self.weight_scale)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])
        ### END SOLUTION
