"""A model with fewer bits: quantization, pruning, distillation, and what each costs.

quantize, Quantized, INT8, INT4     matrices in whole numbers (quantize.py)
"""

from utils.compression.quantize import INT4, INT8, Quantized, Scheme, quantize

__all__ = ["INT4", "INT8", "Quantized", "Scheme", "quantize"]
