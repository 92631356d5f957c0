"""Compiles one kernel for one GPU, and takes the result apart: what `machine_code` starts.

    python -P utils/kernels/compile_ahead.py < request.json > result.json

It is a process of its own, because one whose kernels are interpreted cannot compile. It needs no
GPU and no driver, and imports neither torch nor the workshop. `ptxas` and `cuobjdump` lie in
Triton's package.
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
    capability: int,
    warps: int,
) -> dict:
    """{"ttgir", "ptx", "sass", "usage", "shared"}: texts of Triton and of cuobjdump, and bytes.

    source       a file of Python with the kernel and all that it uses
    signature    {argument: Triton's type}, in order; "constexpr" for `constants`
    divisible    arguments that 16 divides
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": warps},
        )
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        texts = {
            name: subprocess.check_output([tool, flag, cubin], text=True)
            for name, flag in (("sass", "--dump-sass"), ("usage", "--dump-resource-usage"))
        }
        texts |= {name: compiled.asm[name] for name in ("ttgir", "ptx")}
        return {**texts, "shared": compiled.metadata.shared}


if __name__ == "__main__":
    try:
        json.dump(compile_ahead(**json.load(sys.stdin)), sys.stdout)
    except Exception as error:  # whatever is wrong with a learner's kernel
        json.dump({"error": f"{type(error).__name__}: {error}"}, sys.stdout)
