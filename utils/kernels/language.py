"""The Triton language on this machine: is it there, and who runs its kernels?

    from utils.kernels.language import tl, triton       # instead of two imports

    @triton.jit
    def kernel(x, n, BLOCK: tl.constexpr): ...

    TRITON_INTERPRET=1 python …                         # every kernel is interpreted

`@triton.jit` hands a function to Triton's compiler, which needs a GPU, or, with TRITON_INTERPRET=1
in the environment, to its interpreter: NumPy on the CPU, one program after the other. The whole
process has one of the two, because the language's own functions (`tl.sum`, `tl.cdiv`) are handed
over when Triton is imported. What the compiler would make of a kernel is therefore asked in a
process of its own (`machine_code.py`).
"""

import torch

try:
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
except ImportError as error:
    raise ImportError(
        "the Triton language is not installed here: on Linux `make setup TRITON=yes` installs it "
        f"(0.7 GB), for other systems there is none ({error})"
    ) from None

INTERPRETED = isinstance(tl.cdiv, InterpretedFunction)  # which of the two this process has

if triton.knobs.runtime.interpret != INTERPRETED:
    raise ImportError(
        "TRITON_INTERPRET was changed after Triton had been imported, which fixes who runs the "
        "kernels of a process: set it before, in a notebook after a restart of its kernel"
    )


def check_device(device: torch.device, instead: str) -> None:
    """Raises ValueError unless this process's kernels can work on tensors of that device.

    instead   what to take for tensors that they cannot
    """
    if device.type == "cuda" and INTERPRETED:
        raise ValueError(
            "TRITON_INTERPRET=1 is set, and the interpreter cannot read a GPU's memory: unset it, "
            "or put the tensors on the CPU"
        )
    if device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            f"Triton's kernels need a GPU, and these tensors are on the CPU: take {instead}, or "
            "set TRITON_INTERPRET=1 before Python starts, which interprets them, for tests only"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"Triton's kernels cannot work on {device.type}: take {instead}")


# ---- 16 bits, by integers: the interpreter's own casts cut off what a GPU's round


@triton.jit
def bf16_bits(x, extra):
    """The upper 16 bits of fp32 numbers after adding `extra` (0 … 0xFFFF) to all 32: bf16.

    A carry out of the lower half is the rounding up. Infinity stays, NaN becomes the usual one.
    """
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(x == x, bits + extra, 0x7FC00000)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_bf16(x):
    """fp32 rounded to the nearest bf16, to the even one where two are equally near."""
    bits = x.to(tl.uint32, bitcast=True)
    return bf16_bits(x, 0x7FFF + ((bits >> 16) & 1))


@triton.jit
def rounded(x, ptr):
    """fp32 numbers as they go to where the pointer points: to bf16 by `to_bf16`; what a store does
    to other types is right everywhere."""
    return to_bf16(x) if ptr.dtype.element_ty == tl.bfloat16 else x


@triton.jit
def to_bf16_stochastic(x, random):
    """fp32 rounded up to a bf16 with a probability equal to the part of the way up, else down.

    random   32 random bits for each number
    """
    return bf16_bits(x, random.to(tl.uint32, bitcast=True) & 0xFFFF)
