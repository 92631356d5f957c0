"""Handwritten kernels in the Triton language (the language, not the server), for work whose cost
is moving bytes.

    AdamWTriton          a torch optimizer whose step is one launch for all tensors (adamw.py)
    rms_norm             RMSNorm, forward and backward, each one pass over memory (rms_norm.py)
    paged_attention …    a served model's decode step except its matrix products, and products with
                         integer weights (decode.py)
    machine_code         the instructions a GPU would execute, without a GPU (machine_code.py)

On a GPU, Triton compiles them. On a CPU, its interpreter runs them if TRITON_INTERPRET=1 is set
before Triton is imported: the values are right, the times meaningless (language.py).
"""

from utils.kernels.adamw import AdamWTriton
from utils.kernels.decode import (
    add_norm,
    gated,
    int4_product,
    int8_product,
    paged_attention,
    race,
    splits_for,
    turn_and_keep,
)
from utils.kernels.machine_code import GPUS, MachineCode, machine_code, occupancy
from utils.kernels.rms_norm import rms_norm

__all__ = [
    "GPUS",
    "AdamWTriton",
    "MachineCode",
    "add_norm",
    "gated",
    "int4_product",
    "int8_product",
    "machine_code",
    "occupancy",
    "paged_attention",
    "race",
    "rms_norm",
    "splits_for",
    "turn_and_keep",
]
