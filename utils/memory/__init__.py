"""Ways to reduce a step's memory, or the time it spends on memory.

    autocast, weights_in, LossScaler               computing in 16 bits (precision.py)
    recompute                                      activation checkpointing (checkpointing.py)
    offloaded_activations, OffloadedOptimizer      tensors leave the device temporarily (offload.py)

`number_formats` does the arithmetic of floating-point formats by hand.
"""

from utils.memory.checkpointing import recompute
from utils.memory.offload import OffloadedOptimizer, offloaded_activations
from utils.memory.precision import LossScaler, autocast, weights_in

__all__ = [
    "LossScaler",
    "OffloadedOptimizer",
    "autocast",
    "offloaded_activations",
    "recompute",
    "weights_in",
]
