"""The Triton language on this machine: whether it is installed, and what runs its kernels.

    from utils.kernels.language import tl, triton       # instead of two imports

    @triton.jit
    def kernel(x, n, BLOCK: tl.constexpr): ...

    TRITON_INTERPRET=1 python …                         # every kernel is interpreted

`@triton.jit` passes a function to Triton's compiler, which needs a GPU, or, with TRITON_INTERPRET=1
in the environment, to its interpreter: NumPy on the CPU, one program at a time. The whole process
uses one of the two, because the choice is made for the language's own functions (`tl.sum`,
`tl.cdiv`) when Triton is imported. `machine_code.py` therefore compiles in a separate process.
"""

import torch

try:
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
except ImportError as error:
    raise ImportError(
        "the Triton language is not installed here: on Linux `make setup TRITON=yes` installs it "
        f"(0.7 GB); it does not exist for other systems ({error})"
    ) from None

INTERPRETED = isinstance(tl.cdiv, InterpretedFunction)  # which of the two this process uses

if triton.knobs.runtime.interpret != INTERPRETED:
    raise ImportError(
        "TRITON_INTERPRET was changed after Triton was imported, when it is too late: set it "
        "before the import; in a notebook, restart the kernel first"
    )


def check_device(device: torch.device, instead: str) -> None:
    """Raise ValueError unless this process's kernels can work on tensors of this device.

    instead   what to use for tensors on other devices
    """
    if device.type == "cuda" and INTERPRETED:
        raise ValueError(
            "TRITON_INTERPRET=1 is set, but the interpreter cannot read a GPU's memory: unset it, "
            "or put the tensors on the CPU"
        )
    if device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            f"Triton's kernels need a GPU, but these tensors are on the CPU: use {instead}, or set "
            "TRITON_INTERPRET=1 before Python starts to interpret them, for tests only"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"Triton's kernels cannot work on {device.type}: use {instead}")


# ---- 16 bits, by integers: the interpreter's own casts truncate where a GPU's round


@triton.jit
def bf16_bits(x, extra):
    """bf16 from fp32: the upper 16 bits after adding `extra` (0 … 0xFFFF) to all 32.

    A carry out of the lower half rounds up. Infinity stays; NaN becomes the canonical one.
    """
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(x == x, bits + extra, 0x7FC00000)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_bf16(x):
    """fp32 rounded to the nearest bf16, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    return bf16_bits(x, 0x7FFF + ((bits >> 16) & 1))


@triton.jit
def rounded(x, ptr):
    """fp32 values in the type of the pointer's target: bf16 by `to_bf16`; for other types the
    store's own conversion is right everywhere."""
    return to_bf16(x) if ptr.dtype.element_ty == tl.bfloat16 else x


@triton.jit
def to_bf16_stochastic(x, random):
    """fp32 rounded up to bf16 with a probability equal to the fraction of the way up, else down.

    random   32 random bits per value
    """
    return bf16_bits(x, random.to(tl.uint32, bitcast=True) & 0xFFFF)
