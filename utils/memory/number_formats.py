"""Floating-point formats: what their bits represent, and rounding to them, by arithmetic.

    FP16 = FORMATS["fp16"]
    FP16.largest, FP16.smallest_normal, FP16.smallest, FP16.epsilon   # 65504.0, 6.1e-05, …
    split_bits(0.1, FP16)             # ("0", "01011", "1001100110"): sign, exponent, mantissa
    round_to(x, FP16)                 # x as fp16 would hold it, in the type of x
    fate(x, FP16)                     # fractions of x: zero, subnormal, kept, overflow

A number is (-1)^sign · 2^(exponent - bias) · (1 + mantissa / 2^M). If all exponent bits are 0, it
is (-1)^sign · 2^(1 - bias) · mantissa / 2^M: a *subnormal* number, with fewer digits the closer it
is to 0. If all exponent bits are 1, it is infinity or NaN (IEEE 754). fp8 e4m3 gives up infinity
for a larger range (Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433,
Table 1). `round_to` needs neither hardware nor a torch type for a format: tf32 has none, since it
exists only inside a GPU's matrix units.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A format, by its bits for exponent and mantissa; the sign always has 1."""

    name: str
    exponent: int
    mantissa: int
    dtype: torch.dtype | None = None  # torch's type; None if it has none
    infinite: bool = True  # False: the highest exponent holds numbers and NaN

    @property
    def bits(self) -> int:
        """The number of significant bits; tf32 has 19 and is stored in 32."""
        return 1 + self.exponent + self.mantissa

    @property
    def bytes(self) -> int:
        """Bytes per number in memory."""
        return 4 if self.dtype is None else self.dtype.itemsize

    @property
    def bias(self) -> int:
        """The value subtracted from the exponent's bits."""
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self) -> float:
        """The largest finite number."""
        code = 2**self.exponent - (2 if self.infinite else 1)
        top = 2.0 - 2.0**-self.mantissa * (1 if self.infinite else 2)  # all ones is NaN in e4m3
        return top * 2.0 ** (code - self.bias)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with a full mantissa."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest number above 0: the last subnormal."""
        return 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def epsilon(self) -> float:
        """The gap from 1 to the next number; rounding has at most half this relative error."""
        return 2.0**-self.mantissa


FORMATS = {
    form.name: form
    for form in (
        Format("fp32", 8, 23, torch.float32),
        Format("tf32", 8, 10),
        Format("fp16", 5, 10, torch.float16),
        Format("bf16", 8, 7, torch.bfloat16),
        Format("fp8 e4m3", 4, 3, torch.float8_e4m3fn, infinite=False),
        Format("fp8 e5m2", 5, 2, torch.float8_e5m2),
    )
}


def spacing(x: torch.Tensor | float, form: Format) -> torch.Tensor:
    """The distance between neighbouring numbers of `form` at x; fp64, in the shape of x."""
    _, power = torch.frexp(_doubles(x))  # |x| = m · 2^power with m in [0.5, 1)
    power = (power - 1).clamp(min=1 - form.bias)  # below that: subnormals, all equally spaced
    return torch.ldexp(torch.ones_like(power, dtype=torch.float64), power - form.mantissa)


def round_to(
    x: torch.Tensor | float, form: Format, stochastic: torch.Generator | None = None
) -> torch.Tensor:
    """x rounded to numbers that `form` can represent, in the dtype of x (for a number: fp64).

    Rounds to nearest, ties to even mantissas. With a generator, rounds up with a probability equal
    to the fraction of the way up, else down, so that the mean is x (stochastic rounding; Gupta et
    al. 2015, arXiv:1502.02551). Values that are too large become infinite or, in a format without
    infinity, its largest number.
    """
    values = _doubles(x)
    step = spacing(values, form)
    steps = values / step  # exact: the step is a power of 2
    if stochastic is None:
        steps = steps.round()  # torch rounds halves to even
    else:
        chance = torch.rand(steps.shape, generator=stochastic, dtype=torch.float64)
        steps = (steps + chance.to(steps.device)).floor()
    rounded = steps * step
    limit = float("inf") if form.infinite else form.largest
    rounded = torch.where(rounded.abs() > form.largest, rounded.sign() * limit, rounded)
    rounded = torch.where(values.isfinite(), rounded, values)
    return rounded.to(x.dtype) if isinstance(x, torch.Tensor) else rounded


def split_bits(value: float, form: Format) -> tuple[str, str, str]:
    """The bits of `value` rounded to `form`: sign, exponent, mantissa, highest bits first."""
    number = round_to(value, form).float()
    if form.dtype is None:  # tf32: the first 19 bits of fp32
        code = number.view(torch.int32).item() >> (23 - form.mantissa)
    else:
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[form.bytes]
        code = number.to(form.dtype).view(integer).item()
    text = format(code & (2**form.bits - 1), f"0{form.bits}b")
    return text[0], text[1 : 1 + form.exponent], text[1 + form.exponent :]


def from_bits(sign: str, exponent: str, mantissa: str, form: Format) -> float:
    """The number that the bits represent, by the formula at the top of this file."""
    code, fraction = int(exponent, 2), int(mantissa, 2) / 2**form.mantissa
    signum = -1.0 if sign == "1" else 1.0
    if form.infinite and code == 2**form.exponent - 1:
        return float("nan") if fraction else signum * float("inf")
    if not form.infinite and "0" not in exponent + mantissa:
        return float("nan")
    if code == 0:
        return signum * fraction * form.smallest_normal
    return signum * (1 + fraction) * 2.0 ** (code - form.bias)


def fate(x: torch.Tensor, form: Format) -> dict[str, float]:
    """The fractions of nonzero values of x that become zero or subnormal, stay, or overflow."""
    size = x.abs().double()
    size = size[size > 0]
    rounded = round_to(size, form)
    count = max(1, size.numel())
    zero = (rounded == 0).sum().item() / count
    subnormal = (rounded < form.smallest_normal).sum().item() / count - zero
    overflow = (size > form.largest).sum().item() / count
    return {
        "zero": zero,
        "subnormal": subnormal,
        "kept": max(0.0, 1.0 - zero - subnormal - overflow),
        "overflow": overflow,
    }


def _doubles(x):
    """x as fp64, from a tensor of any shape, a number or a list."""
    return x.detach().double() if isinstance(x, torch.Tensor) else torch.tensor(x).double()
