"""What a GPU would execute, read from the machine code: no GPU and no driver are needed.

    code = machine_code(adamw_one, p, g, m, v, n, *numbers, BLOCK=1024, gpu="H100")
    code.loads, code.stores        # {128: 8}, {128: 6}: instructions by the bits for a thread
    code.bytes_per(1024)           # 28.0 bytes for each of a program's 1024 numbers
    code.registers, code.spills, code.shared
    occupancy(code)                # how many warps an SM can hold at once, and what limits them
    print(code.sass)

The arguments are those of a launch, and what Triton sees in them is what it would see then: types,
and whether 16 divides an address or a whole number. `p[1:]` is a tensor whose address 16 does not
divide; a tensor on the device "meta" has a size and no memory. Source: NVIDIA, CUDA Binary
Utilities (instructions of Ampere and Hopper), https://docs.nvidia.com/cuda/cuda-binary-utilities/.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from utils.kernels.language import tl

TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "i1",
}
SECONDS = 300  # that a compilation may take; usual are 1 to 3


@dataclass(frozen=True)
class GPU:
    """What an SM of a GPU has. NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per
    Compute Capability"; number of SMs: NVIDIA A100 and H100 Tensor Core GPU Architecture (SXM)."""

    name: str
    capability: int
    sms: int
    shared: int  # bytes of shared memory
    registers: int = 65536  # of 32 bits
    warps: int = 64
    blocks: int = 32


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A100", 80, sms=108, shared=164 * 1024),
        GPU("H100", 90, sms=132, shared=228 * 1024),
    )
}

# ---- 1. from a kernel to its machine code


@dataclass(frozen=True)
class MachineCode:
    """One kernel, compiled for one GPU. Counts are of instructions as they stand in the code: what
    stands in a loop is executed more often."""

    kernel: str
    gpu: str
    threads: int  # of a program
    registers: int  # of a thread
    spills: int  # bytes of a thread that did not fit into registers
    shared: int  # bytes of a program
    loads: dict[int, int]  # {bits for a thread: instructions} from global memory, widest first
    stores: dict[int, int]
    scalars: dict[int, int]  # not in these: a number that the whole program loads or stores once
    sass: str = field(repr=False)  # the machine code as text
    ptx: str = field(repr=False)

    def bytes_per(self, elements: int) -> float:
        """Bytes between global memory and registers for each of a program's `elements`, where
        every thread executes every load and store once and no mask is false. Scalars do not count:
        all threads ask for the same few bytes."""
        accesses = [*self.loads.items(), *self.stores.items()]
        return sum(bits * count for bits, count in accesses) / 8 * self.threads / elements


def machine_code(
    kernel: Callable, *arguments: Any, gpu: str = "H100", num_warps: int = 4, **named: Any
) -> MachineCode:
    """Compiles a kernel for a GPU of `GPUS` and reads its machine code.

    kernel      a function under `@triton.jit`, of a file or of a notebook's cell
    arguments   those of a launch; tensors may be on any device, also on "meta"

    It takes 1 to 3 s, in a process of its own; asked again, nothing. Raises ValueError for a GPU
    that is not known, arguments that do not fit, and with the compiler's words where it refuses.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu {gpu!r} is not one of {', '.join(GPUS)}")
    function = _raw(kernel)
    if not isinstance(function, FunctionType):
        raise ValueError(f"{kernel!r} is no kernel: give a function under @triton.jit")
    try:
        bound = inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise ValueError(f"{function.__name__}: {error}") from None
    bound.apply_defaults()
    signature, constants, divisible = {}, {}, []
    for name, value in bound.arguments.items():
        if function.__annotations__.get(name) in (tl.constexpr, "tl.constexpr") or value is None:
            signature[name], constants[name] = "constexpr", value
        elif type(value) is int and value == 1:  # Triton makes a constant of it, too
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = _type(name, value)
            number = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if type(number) is int and number % 16 == 0:
                divisible.append(name)
    request = {
        "source": _source(function),
        "kernel": function.__name__,
        "signature": signature,
        "constants": constants,
        "divisible": divisible,
        "capability": GPUS[gpu].capability,
        "warps": num_warps,
    }
    result = _in_a_child(json.dumps(request))
    if "error" in result:
        raise ValueError(f"{function.__name__} does not compile: {result['error']}")
    usage = dict(re.findall(r"\b([A-Z]+):(\d+)", result["usage"].split(function.__name__)[-1]))
    instructions = re.findall(r"/\*([0-9a-f]{4,})\*/ +(\S.*?) *;", result["sass"])
    sass = "\n".join(f"{address}  {instruction}" for address, instruction in instructions)
    loads, stores = (_widths(sass, kind) for kind in ("LDG(?:STS)?", "STG"))
    scalars = _scalars(result["ttgir"], "load", loads) + _scalars(result["ttgir"], "store", stores)
    return MachineCode(
        function.__name__,
        gpu,
        threads=32 * num_warps,
        registers=int(usage["REG"]),
        spills=int(usage["STACK"]) + int(usage["LOCAL"]),
        shared=result["shared"],
        loads=_widest_first(loads),
        stores=_widest_first(stores),
        scalars=_widest_first(scalars),
        sass=sass,
        ptx=result["ptx"],
    )


def _raw(kernel):
    """The Python function under `@triton.jit` and other decorators of Triton."""
    while not isinstance(kernel, FunctionType) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _type(name, value):
    """Triton's word for the type of an argument."""
    if isinstance(value, torch.Tensor) and value.dtype in TYPES:
        return "*" + TYPES[value.dtype]
    if type(value) is bool:
        return "i1"
    if type(value) is int:
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if type(value) is float:
        return "fp32"
    raise ValueError(f"argument {name} is {value!r}: give a tensor or a number, as to a launch")


def _source(function):
    """A file of Python with this kernel, the kernels that it calls and the constants it reads."""
    lines, done = ["import triton"], set()

    def add(function):
        for name in sorted(_names(function.__code__)):
            value = function.__globals__.get(name)
            if name in done or value is None:
                continue
            done.add(name)
            if isinstance(value, ModuleType) and value.__name__.startswith("triton"):
                lines.append(f"import {value.__name__} as {name}")
            elif isinstance(value, (bool, int, float, str, tl.constexpr)):
                value = getattr(value, "value", value)
                lines.append(f"{name} = triton.language.constexpr({value!r})")
            elif isinstance(_raw(value), FunctionType) and _raw(value) is not value:
                add(_raw(value))
        text = textwrap.dedent(inspect.getsource(function))
        lines.append("@triton.jit\n" + text[re.search(r"^def ", text, re.M).start() :])

    add(function)
    return "\n".join(lines)


def _names(code):
    """What a function's code reads, its annotations too."""
    inner = (const for const in code.co_consts if hasattr(const, "co_names"))
    return {"tl", *code.co_names}.union(*map(_names, inner))


@lru_cache(maxsize=256)
def _in_a_child(request):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_ahead.py")
    done = subprocess.run(
        [sys.executable, "-P", script], input=request, env=environment, capture_output=True,
        text=True, timeout=SECONDS,
    )
    try:
        return json.loads(done.stdout)
    except ValueError:  # the compiler itself has died
        return {"error": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]}


def _widths(sass, kind):
    """{bits: instructions} of one kind: `LDG.E.128` loads 128 bits, `STG.E` stores 32."""
    found = Counter()
    for suffixes in re.findall(rf"\b{kind}\b((?:\.\w+)*)", sass):
        parts = suffixes.split(".")
        wide = next((int(part) for part in parts if part in ("64", "128", "256")), None)
        narrow = next((int(part[1:]) for part in parts if re.fullmatch("[US](8|16)", part)), None)
        found[wide or narrow or 32] += 1
    return found


def _scalars(ttgir, operation, found):
    """Takes out of `found` what Triton's own code loads or stores as a single number."""
    scalars = Counter()
    for line in re.findall(rf"tt\.{operation}\b.* : !tt\.ptr<[a-z]+(\d+)>", ttgir):
        bits = int(line)
        while bits > 8 and not found[bits]:  # of 64 bits of which 32 are used, 32 are loaded
            bits //= 2
        taken = min(1, found[bits])
        found[bits] -= taken
        scalars[bits] += taken
    return scalars


def _widest_first(found):
    return {bits: count for bits, count in sorted(found.items(), reverse=True) if count}


# ---- 2. how many of them an SM can hold


@dataclass(frozen=True)
class Occupancy:
    """What one SM holds at once. Memory is slow to answer: the more warps wait, the more bytes are
    on their way."""

    programs: int
    warps: int
    share: float  # of the warps that the SM has room for
    limit: str  # "warps", "blocks", "registers" or "shared memory"


def occupancy(code: MachineCode) -> Occupancy:
    """Programs and warps of a kernel on one SM, by the arithmetic of NVIDIA's occupancy calculator.

    Registers are given to a warp in units of 256, to warps in fours, shared memory to a program in
    units of 128 bytes, and 1 KiB of it is the system's (CUDA C++ Programming Guide; Ampere and
    Hopper Tuning Guides, "Occupancy").
    """
    gpu = GPUS[code.gpu]
    warps = code.threads // 32
    of_a_warp = -(-code.registers * 32 // 256) * 256
    held = gpu.registers // of_a_warp // 4 * 4
    shared = -(-(code.shared + 1024) // 128) * 128
    limits = {
        "warps": gpu.warps // warps,
        "blocks": gpu.blocks,
        "registers": held // warps,
        "shared memory": gpu.shared // shared,
    }
    limit = min(limits, key=limits.__getitem__)
    programs = limits[limit]
    return Occupancy(programs, programs * warps, programs * warps / gpu.warps, limit)
