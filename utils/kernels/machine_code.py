"""The instructions a GPU would execute, read from machine code, without a GPU or a driver.

    code = machine_code(adamw_one, p, g, m, v, n, *numbers, BLOCK=1024, gpu="H100")
    code.loads, code.stores        # {128: 8}, {128: 6}: instructions by bits per thread
    code.bytes_per(1024)           # 28.0 bytes for each of a program's 1024 elements
    code.registers, code.spills, code.shared
    occupancy(code)                # how many warps an SM can hold at once, and what limits them
    print(code.assembly)

The arguments are those of a launch, and Triton sees in them what it would see then: types, and
whether an address or an integer is a multiple of 16. The address of `p[1:]` is not; a tensor on the
"meta" device has a size and no memory. Sources: NVIDIA, CUDA Binary
Utilities (instructions of Ampere and Hopper), https://docs.nvidia.com/cuda/cuda-binary-utilities/;
AMD, Instruction Set Architecture of CDNA 2 ("Flat, Scratch and Global", "Vector Memory").
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
SECONDS = 300  # time limit for a compilation; 1 to 3 are usual


@dataclass(frozen=True)
class Vendor:
    """Triton's name for a vendor, and how its instructions begin; `WIDTHS` has their endings."""

    backend: str
    lanes: int  # threads of a warp (NVIDIA) or of a wave (AMD)
    load: str
    store: str
    single: str  # the ending of instructions that may serve a whole program: `_scalars`


NVIDIA = Vendor("cuda", 32, load=r"\bLDG(?:STS)?", store=r"\bSTG", single="")
AMD = Vendor(
    "hip", 64,
    load=r"\b(?:global|buffer|flat)_load(?!.*Folded)",  # "Folded": of a spilled value
    store=r"\b(?:global|buffer|flat)_store(?!.*Folded)",
    single=r" .* s\[\d+:\d+\](?!,)",  # the address is in scalar registers: one set for a wave
)
WIDTHS = {  # bits per thread; 32 without any of these words (`LDG.E`, `global_load_dword`)
    "U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256,
    "byte": 8, "ubyte": 8, "sbyte": 8, "short": 16, "ushort": 16, "sshort": 16,
    "dwordx2": 64, "dwordx3": 96, "dwordx4": 128,
}


@dataclass(frozen=True)
class GPU:
    """The resources of a GPU's SM, or of AMD's *compute unit* (CU).

    NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; NVIDIA
    A100 and H100 Tensor Core GPU Architecture (SXM). ROCm documentation, "AMD GPU specifications";
    LLVM, "User Guide for AMDGPU Backend" (units of registers and of shared memory).
    """

    name: str
    arch: int | str
    sms: int
    shared: int  # bytes of shared memory
    vendor: Vendor = NVIDIA
    registers: int = 65536  # of 32 bits
    warps: int = 64
    blocks: int = 32
    unit: int = 128  # bytes per unit of shared memory given to a program
    reserved: int = 1024  # bytes of it reserved for the system, per program


def _amd(name, arch, cus, shared, unit=512):
    return GPU(name, arch, cus, shared, AMD, 2 * 65536, warps=32, unit=unit, reserved=0)


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A100", 80, sms=108, shared=164 * 1024),
        GPU("H100", 90, sms=132, shared=228 * 1024),
        _amd("MI250X", "gfx90a", 110, 64 * 1024),  # one of its two dies; each is a device
        _amd("MI300X", "gfx942", 304, 64 * 1024),
        _amd("MI355X", "gfx950", 256, 160 * 1024, unit=1280),
    )
}

# ---- 1. from a kernel to its machine code


@dataclass(frozen=True)
class MachineCode:
    """One kernel, compiled for one GPU. Counts are of instructions in the code; those in a loop are
    executed more often."""

    kernel: str
    gpu: str
    threads: int  # per program
    registers: int  # per thread
    spills: int  # bytes per thread that did not fit into registers
    shared: int  # bytes per program
    loads: dict[int, int]  # {bits per thread: instructions} from global memory, widest first
    stores: dict[int, int]
    scalars: dict[int, int]  # not in these: values that the whole program loads or stores once
    assembly: str = field(repr=False)  # the instructions as text

    def bytes_per(self, elements: int) -> float:
        """Bytes between global memory and registers per element of a program's `elements`, if
        every thread executes every load and store once and no mask is false. Scalars do not count:
        all threads access the same few bytes."""
        accesses = [*self.loads.items(), *self.stores.items()]
        return sum(bits * count for bits, count in accesses) / 8 * self.threads / elements


def machine_code(
    kernel: Callable, *arguments: Any, gpu: str = "H100", num_warps: int = 4, **named: Any
) -> MachineCode:
    """Compile a kernel for a GPU of `GPUS` and read its machine code.

    kernel      a function under `@triton.jit`, from a file or a notebook cell
    arguments   those of a launch; tensors may be on any device, even "meta"

    It takes 1 to 3 s, in a separate process; repeated requests are cached. Raises ValueError for an
    unknown GPU, for arguments that do not fit, and with the compiler's message if it fails.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu {gpu!r} is not one of {', '.join(GPUS)}")
    vendor, function = GPUS[gpu].vendor, _raw(kernel)
    if not isinstance(function, FunctionType):
        raise ValueError(f"{kernel!r} is not a kernel: give a function under @triton.jit")
    try:
        bound = inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise ValueError(f"{function.__name__}: {error}") from None
    bound.apply_defaults()
    signature, constants, divisible = {}, {}, []
    for name, value in bound.arguments.items():
        if function.__annotations__.get(name) in (tl.constexpr, "tl.constexpr") or value is None:
            signature[name], constants[name] = "constexpr", value
        elif type(value) is int and value == 1:  # Triton also makes it a constant
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
        "target": (vendor.backend, GPUS[gpu].arch, vendor.lanes),
        "warps": num_warps,
    }
    result = _in_a_child(json.dumps(request))
    if "error" in result:
        raise ValueError(f"{function.__name__} does not compile: {result['error']}")
    read = _read_nvidia if vendor is NVIDIA else _read_amd
    assembly, registers, spills = read(result["assembly"], result["usage"], function.__name__)
    counts, scalars = [], Counter()
    for kind, operation in ((vendor.load, "load"), (vendor.store, "store")):
        found, single = _widths(assembly, kind), _widths(assembly, kind, vendor.single)
        once = _scalars(result["ttgir"], operation, single)
        counts.append(_widest_first(found - once))
        scalars += once
    return MachineCode(
        function.__name__,
        gpu,
        threads=vendor.lanes * num_warps,
        registers=registers,
        spills=spills,
        shared=result["shared"],
        loads=counts[0],
        stores=counts[1],
        scalars=_widest_first(scalars),
        assembly=assembly,
    )


def _read_nvidia(sass, usage, kernel):
    """(instructions, registers, bytes spilled) from the output of cuobjdump."""
    used = dict(re.findall(r"\b([A-Z]+):(\d+)", usage.split(kernel)[-1]))
    instructions = re.findall(r"/\*([0-9a-f]{4,})\*/ +(\S.*?) *;", sass)
    text = "\n".join(f"{address}  {instruction}" for address, instruction in instructions)
    return text, int(used["REG"]), int(used["STACK"]) + int(used["LOCAL"])


def _read_amd(amdgcn, usage, kernel):
    """(instructions, registers, bytes spilled) from LLVM's assembly, which ends with a description
    of the kernel."""
    registers, spills = (
        int(re.search(rf"\.{name}: +(\d+)", usage)[1])
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    return "\n".join(re.findall(r"^\t([a-z]\w+.*)", amdgcn, re.M)), registers, spills


def _raw(kernel):
    """The Python function under `@triton.jit` and Triton's other decorators."""
    while not isinstance(kernel, FunctionType) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _type(name, value):
    """Triton's name for the type of an argument."""
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
    """Python source with this kernel, the kernels it calls and the constants it reads."""
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
    """The names that a function's code reads, including its annotations."""
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
    except ValueError:  # the compiler itself died
        return {"error": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]}


def _widths(assembly, kind, end=""):
    """{bits: instructions} of one kind: `LDG.E.128` and `global_load_dwordx4` load 128 bits."""
    words = re.findall(rf"{kind}((?:[._][a-zA-Z0-9]+)+){end}", assembly)
    return Counter(
        next((WIDTHS[word] for word in re.split("[._]", each) if word in WIDTHS), 32)
        for each in words
    )


def _scalars(ttgir, operation, found):
    """{bits: instructions} of those `found` that are single values in Triton's own code. (Most of
    AMD's are not among them: a separate scalar unit executes them, as `s_load`.)"""
    scalars = Counter()
    for line in re.findall(rf"tt\.{operation}\b.* : !tt\.ptr<[a-z]+(\d+)>", ttgir):
        bits = int(line)
        while bits > 8 and not found[bits] - scalars[bits]:  # 32 of 64 bits used: 32 are loaded
            bits //= 2
        scalars[bits] += min(1, found[bits] - scalars[bits])
    return scalars


def _widest_first(found):
    return {bits: count for bits, count in sorted(found.items(), reverse=True) if count}


# ---- 2. how many programs an SM can hold


@dataclass(frozen=True)
class Occupancy:
    """The programs and warps that one SM holds at once. Memory is slow to answer, so more waiting
    warps mean more bytes in flight."""

    programs: int
    warps: int
    share: float  # fraction of the warps that the SM has room for
    limit: str  # "warps", "blocks", "registers" or "shared memory"


def occupancy(code: MachineCode) -> Occupancy:
    """The programs and warps of a kernel on one SM, by the arithmetic of NVIDIA's occupancy
    calculator, which LLVM uses for AMD with other numbers.

    Registers are allocated to threads in units of 8 and to warps in groups of four (an SM and a CU
    have four schedulers), shared memory to programs in units (CUDA C++ Programming Guide; Ampere
    and Hopper Tuning Guides, "Occupancy"; LLVM, llvm-calc-occupancy).
    """
    gpu = GPUS[code.gpu]
    warps = code.threads // gpu.vendor.lanes
    of_a_warp = -(-code.registers // 8) * 8 * gpu.vendor.lanes
    held = gpu.registers // of_a_warp // 4 * 4
    shared = -(-(code.shared + gpu.reserved) // gpu.unit) * gpu.unit
    limits = {
        "warps": gpu.warps // warps,
        "blocks": gpu.blocks,
        "registers": held // warps,
        "shared memory": gpu.shared // max(1, shared),
    }
    limit = min(limits, key=limits.__getitem__)
    programs = limits[limit]
    return Occupancy(programs, programs * warps, programs * warps / gpu.warps, limit)
