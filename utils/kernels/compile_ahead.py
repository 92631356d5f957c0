"""Compiles one kernel for one GPU and extracts the results; `machine_code` starts it.

    python -P utils/kernels/compile_ahead.py < request.json > result.json

It runs in a separate process, because a process that interprets its kernels cannot compile. It
needs no GPU and no driver, and imports neither torch nor the workshop. `ptxas` and `cuobjdump` are
in Triton's package; AMD's assembly comes from LLVM.
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
    """{"ttgir", "assembly", "usage", "shared"}: text from Triton and its assembler, and bytes.

    source       Python source with the kernel and everything it uses
    signature    {argument: Triton's type}, in order; "constexpr" for `constants`
    divisible    arguments that are multiples of 16
    target       Triton's name of the vendor, the architecture, threads per warp
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    vendor = {"cuda": "NVIDIA", "hip": "AMD"}[target[0]]
    if vendor.lower() not in triton.backends.backends:
        raise RuntimeError(f"Triton {triton.__version__} here has no compiler for {vendor}'s GPUs")
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder  # leaves nothing behind
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
    except Exception as error:  # any error in a learner's kernel
        json.dump({"error": f"{type(error).__name__}: {error}"}, sys.stdout)
