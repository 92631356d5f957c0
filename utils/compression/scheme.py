"""Quantization schemes: the integer formats of a matrix. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """How a matrix is quantized to integers.

    bits        per value, 2 to 8
    per         what shares a scale: "tensor", "channel" (a row), or "group" (`group_size` columns
                of a row; the last group of a row may be shorter)
    symmetric   False: a zero point shifts the range to that of the values
    """

    bits: int
    per: str = "channel"
    group_size: int | None = None
    symmetric: bool = True

    def __post_init__(self):
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits {self.bits} is not in 2 to 8")
        if self.per not in ("tensor", "channel", "group"):
            raise ValueError(f"per {self.per!r} is not one of tensor, channel, group")
        if (self.per == "group") != (self.group_size is not None) or (self.group_size or 1) < 1:
            raise ValueError(f"per {self.per} and group_size {self.group_size} cannot be combined")

    @property
    def lowest(self) -> int:
        """The smallest integer; symmetric schemes leave one unused, so that -lowest fits."""
        return -(2 ** (self.bits - 1)) + self.symmetric

    @property
    def highest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def columns_of_a_scale(self, columns: int) -> int:
        return self.group_size if self.per == "group" else columns


INT8 = Scheme(8)
INT4 = Scheme(4, "group", 32)
SCHEMES = {"int8": INT8, "int4": INT4}  # the formats that the server supports
