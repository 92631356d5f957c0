"""Exercise 03c: stochastic rounding, the way to train in bf16 without fp32 masters.

Rounding to the nearest loses every update that is smaller than half a step of bf16, each time
anew. Rounding up with a probability equal to the part of the way up is right on average:
1.001 lies 0.128 of the way from 1 to the next bf16 number, 1.0078125. Round it up in 12.8 % of all
cases, and the mean is 1.001.

A bf16 number is the upper half of an fp32 number's 32 bits:

    fp32   s eeeeeeee mmmmmmm mmmmmmmmmmmmmmmm
    bf16   s eeeeeeee mmmmmmm                    the lower 16 bits are cut off

Write the two functions. `x.view(torch.int32)` gives the bits of fp32 numbers as whole numbers,
`bits.view(torch.float32)` leads back.
"""

import torch


def round_stochastically(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """bf16 for fp32 `x`, each number up or down at random, so that the mean is x.

    What bf16 can hold stays as it is, and a NaN stays a NaN; subnormal numbers are like others. x,
    of any shape, is not changed. All chance comes from `generator`: for each number of its own, and
    from all 16 bits that are cut.
    """
    ### BEGIN SOLUTION: add a random 16-bit number to the bits, set the lower 16 to 0; mind NaN
    noise = torch.randint(0, 2**16, x.shape, generator=generator, dtype=torch.int32)
    bits = (x.view(torch.int32) + noise) & -(2**16)
    return torch.where(x.isnan(), x, bits.view(torch.float32)).bfloat16()  # a carry makes NaN −0
    ### END SOLUTION


@torch.no_grad()
def sgd_step(parameters: list[torch.nn.Parameter], lr: float, step: int, rank: int) -> None:
    """w ← w − lr · grad for bf16 parameters, computed in fp32 and rounded stochastically.

    Every rank calls this with the same averaged gradients. Afterwards all ranks must hold the same
    weights, bit by bit, without a message, also where each was started as a program of its own. In
    each of millions of steps other chances, for each parameter other ones. A parameter whose .grad
    is None stays as it is; gradients are not changed.
    """
    ### BEGIN SOLUTION: one generator for all parameters; choose its seed with care
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        if parameter.grad is None:
            continue
        moved = parameter.float() - lr * parameter.grad.float()
        parameter.copy_(round_stochastically(moved, generator))
    ### END SOLUTION
