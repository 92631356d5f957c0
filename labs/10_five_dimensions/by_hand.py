"""Exercise 10a: what a rank must hold, by hand.

    state_bytes(175e9, tp=8, pp=8, dp=16, zero=1)              # weights, gradients, optimizer
    activation_bytes(96, 12288, 2048, pp=8, micro_batch=1, micro_batches=96)

Two functions of one or two lines each. With them you can work out in your head whether a strategy
fits. Do not call the planner, `utils.planner`. Return any kind of number; a byte lost to rounding
does not matter.
"""

import math


def state_bytes(parameters: float, tp: int, pp: int, dp: int, zero: int) -> float:
    """Bytes of weights, gradients and optimizer state on one rank, in mixed precision with AdamW.

    A parameter has 2 bytes of weight, 2 of gradient and 12 of optimizer state. tp and pp split the
    parameters evenly. zero 1 shards the optimizer state over dp, zero 2 also the gradients, zero 3
    also the weights.
    """
    raise NotImplementedError("16 bytes per parameter of this rank, minus what zero shards over dp")


def activation_bytes(
    layers: int, hidden: int, seq: int, pp: int, micro_batch: int, micro_batches: int
) -> float:
    """Bytes of activations on a rank of the first stage, with full recomputation and 1F1B.

    A layer keeps its input for each micro-batch: 2 bytes for each of micro_batch · seq · hidden
    values. The first stage has layers / pp layers (rounded up), and starts new micro-batches until
    the first one comes back.
    """
    raise NotImplementedError(
        "bytes of one layer's input, times layers here, times micro-batches in flight"
    )
