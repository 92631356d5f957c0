"""A model with fewer bits: quantization, pruning, distillation, and what each costs.

quantize, Quantized         matrices in whole numbers (quantize.py)
Scheme, INT8, INT4          how they become that (scheme.py)
"""

from utils.compression.quantize import Quantized, quantize
from utils.compression.scheme import INT4, INT8, Scheme

__all__ = ["INT4", "INT8", "Quantized", "Scheme", "quantize"]
