"""Compiles one kernel for one GPU, and takes the result apart: what `machine_code` starts.

    python -P utils/kernels/compile_ahead.py < request.json > result.json

It is a process of its own, because one whose kernels are interpreted cannot compile. It needs no
GPU and no driver, and imports neither torch nor the workshop. `ptxas` and `cuobjdump` lie in
Triton's package; AMD's assembly is LLVM's own.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def compile_ahead(
    source: str,
    kernel: str,
    signature: dict[str, str],
    constants: dict[str, Any],
    divisible: list[str],
    target: tuple[str, int | str, int],
    warps: int,
) -> dict:
    """{"ttgir", "assembly", "usage", "shared"}: texts of Triton and of its assembler, and bytes.

    source       a file of Python with the kernel and all that it uses
    signature    {argument: Triton's type}, in order; "constexpr" for `constants`
    divisible    arguments that 16 divides
    target       Triton's word for the vendor, the architecture, threads of a warp
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    vendor = {"cuda": "NVIDIA", "hip": "AMD"}[target[0]]
    if vendor.lower() not in triton.backends.backends:
        raise RuntimeError(f"Triton {triton.__version__} here has no compiler for {vendor}'s GPUs")
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder  # nothing stays behind
        file = Path(folder) / "kernel.py"
        file.write_text(source)
        names = {"__name__": "kernel"}
        exec(compile(source, file, "exec"), names)
        places = {name: (place,) for place, name in enumerate(signature)}
        compiled = triton.compile(
            ASTSource(
                names[kernel],
                signature,
                {places[name]: value for name, value in constants.items()},
                {places[name]: [["tt.divisibility", 16]] for name in divisible},
            ),
            target=GPUTarget(*target),
            options={"num_warps": warps},
        )
        result = {"ttgir": compiled.asm["ttgir"], "shared": compiled.metadata.shared}
        if vendor == "AMD":
            return result | dict.fromkeys(("assembly", "usage"), compiled.asm["amdgcn"])
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        return result | {
            name: subprocess.check_output([tool, flag, cubin], text=True)
            for name, flag in (("assembly", "--dump-sass"), ("usage", "--dump-resource-usage"))
        }


if __name__ == "__main__":
    try:
        json.dump(compile_ahead(**json.load(sys.stdin)), sys.stdout)
    except Exception as error:  # whatever is wrong with a learner's kernel
        json.dump({"error": f"{type(error).__name__}: {error}"}, sys.stdout)
