"""Exercise 03c: stochastic rounding, the way to train in bf16 without fp32 masters.

Rounding to nearest loses every update smaller than half a step of bf16, every time. Rounding
up with a probability equal to the fraction of the way up is right on average: 1.001 is 0.128 of the
way from 1 to the next bf16 number, 1.0078125. Round it up in 12.8 % of all cases, and the mean is
1.001.

A bf16 number is the upper half of an fp32 number's 32 bits:

    fp32   s eeeeeeee mmmmmmm mmmmmmmmmmmmmmmm
    bf16   s eeeeeeee mmmmmmm                    the lower 16 bits are dropped

Write the two functions. `x.view(torch.int32)` gives the bits of fp32 numbers as integers,
`bits.view(torch.float32)` converts them back.
"""

import torch


def round_stochastically(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round fp32 `x` to bf16, each number up or down at random, so that the mean is x.

    A value that bf16 can hold does not change, and a NaN stays a NaN; subnormal numbers are like
    others. x, of any shape, is not changed. All randomness comes from `generator`: each element has
    its own random number, and all 16 dropped bits count.
    """
    raise NotImplementedError(
        "add a random 16-bit number to the bits, set the lower 16 to 0; mind NaN"
    )


@torch.no_grad()
def sgd_step(parameters: list[torch.nn.Parameter], lr: float, step: int, rank: int) -> None:
    """w ← w − lr · grad for bf16 parameters, computed in fp32 and rounded stochastically.

    Every rank calls this with the same averaged gradients. Afterwards all ranks must hold the same
    weights, bit for bit, without a message, even if each was started as a separate program. Use new
    random numbers in each of millions of steps, and different ones for each parameter. A parameter
    whose .grad is None does not change; gradients are not changed.
    """
    raise NotImplementedError("one generator for all parameters; choose its seed with care")
