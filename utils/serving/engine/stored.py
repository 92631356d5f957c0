"""How a version's weights are stored: the names, types and shapes of a rank's tensors. No torch.

    rank_tensors(model, 0, 2, "bfloat16", "int8")      # {name: ("int8", (384, 256))}
    inputs(model, 0, 2)[name]                          # (0, 344): the columns that rank 0 has

A version *computes* in "auto" (as stored, on the CPU in float32), in a floating-point dtype, or in
integers, "int8" or "int4": then the matrices of its blocks are stored as integers, with their
scales under the names of compressed-tensors, and all other tensors are unchanged:

    NAME.weight          int8  (N, K)              int8: a scale per row
    NAME.weight_packed   uint8 (N, G · 16)         int4: two values per byte,
    NAME.weight_scale    fp32  (N, G)                    a scale per 32 columns of a row

Scales are those of the unsharded matrix. In int4 groups of columns stay whole: if a shard boundary
divides one, both ranks have its scale, and zeros instead of the other rank's columns.
"""

from utils.compression.scheme import SCHEMES
from utils.models.config import GPTConfig
from utils.models.tp_plan import rank_shapes, tp_cuts

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# bytes per element, by dtype
FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
WIDTHS = FLOATS | {"int8": 1, "uint8": 1}
COMPUTE = ("auto", *FLOATS, *SCHEMES)
PACKED, SCALE = "_packed", "_scale"  # endings


def is_matrix(name: str) -> bool:
    """Whether int8 and int4 quantize this parameter."""
    return name.endswith(".weight") and name.split(".")[-2] in MATRICES


def rank_tensors(
    model: GPTConfig, rank: int, tp: int, dtype: str, compute: str = "auto"
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name: (dtype, shape)} of the tensors in the files of one of `tp` ranks.

    dtype     of tensors stored in floating point, by torch's name
    compute   one of COMPUTE
    """
    shapes = rank_shapes(model, rank, tp)
    if compute not in SCHEMES:
        return {name: (dtype, shape) for name, shape in shapes.items()}
    size, columns, found = SCHEMES[compute].group_size, inputs(model, rank, tp), {}
    for name, shape in shapes.items():
        if not is_matrix(name):
            found[name] = dtype, shape
            continue
        start, stop = columns[name]
        if size is None:
            found[name], groups = ("int8", shape), 1
        else:
            groups = -(-stop // size) - start // size
            found[name + PACKED] = "uint8", (shape[0], groups * size // 2)
        found[name + SCALE] = "float32", (shape[0], groups)
    return found


def inputs(model: GPTConfig, rank: int, tp: int) -> dict[str, tuple[int, int]]:
    """{name of a matrix: (first column, last column + 1) that a rank has of it}."""
    cuts, found = tp_cuts(model, tp), {}
    for name, shape in model.parameter_shapes().items():
        if is_matrix(name):
            cut = cuts[name]
            start = sum(cut.sizes[:rank]) if cut.dim == 1 else 0
            found[name] = start, start + cut.shape(rank, shape)[1]
    return found
