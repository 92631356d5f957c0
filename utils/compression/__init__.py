"""A model with fewer bits: quantization, pruning, distillation, and the cost of each.

quantize, Quantized         matrices in integers (quantize.py)
Scheme, INT8, INT4          their formats (scheme.py)
"""

from utils.compression.quantize import Quantized, quantize
from utils.compression.scheme import INT4, INT8, Scheme

__all__ = ["INT4", "INT8", "Quantized", "Scheme", "quantize"]
