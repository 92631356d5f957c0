"""A decode step in C++ on the CPU: step.cpp, compiled once per machine and called through ctypes.

    library = load(seconds=60)                       # NotCompiled gives the reason on failure
    product = library.floats(weight, bias)           # or library.int8(...), library.int4(...)
    y = product(x)                                   # (..., K) -> (..., N)
    step = Step(library, config, blocks, cache)
    x = step(x, slots=[0, 3], positions=[17, 5])     # (B, C) -> (B, C)

For a small model, PyTorch's operators (model.py, linear.py) cost more than the arithmetic. They are
the reference, and are used without a compiler, on a GPU, with dtypes other than float32, and with
`enforce_eager`. Milliseconds per decode step of models/base at position 64, one thread of a CPU
with VNNI, with PyTorch's operators and with this file:

    rows             1            4           16
    fp32     1.5   0.8    2.6   1.4    7.2   4.5
    int8     2.5   0.5    4.3   1.0    8.0   3.2
    int4     4.9   0.7    6.8   1.5   11.6   4.5

In int8 with 16 rows, about half of the time is attention, which reads 17 MB of keys and values.

The compiled library is cached in ~/.cache/kintsugi (or $XDG_CACHE_HOME/kintsugi), under a name
derived from step.cpp, the flags and this CPU. If several processes need it at once, one compiles it
within seconds and the others wait.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from utils.compression.scheme import INT8
from utils.models.config import GPTConfig
from utils.serving.engine.linear import half_is_enough

# ---- 1. compiled once

SOURCE = Path(__file__).with_name("step.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
# without errno and floating-point traps, rounding and square roots are vectorized
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]


class NotCompiled(RuntimeError):
    """There is no compiled step; the message gives the reason."""


def load(seconds: float) -> "Library":
    """The compiled step.cpp, from the cache or compiled now. Raises NotCompiled, after `seconds` at
    the latest."""
    try:
        return Library(ctypes.CDLL(str(_compiled(seconds))))
    except (OSError, RuntimeError) as error:  # no writable folder, an unknown home
        raise NotCompiled(str(error).partition("\n")[0]) from None


def _compiled(seconds):
    """The file of the compiled library."""
    deadline = time.monotonic() + seconds
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    file = Path(cache, "kintsugi", f"step-{_key()}.so")
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        _take(lock, deadline)
        if not file.exists():
            beside = file.with_suffix(".new")
            _compile(beside, deadline)
            beside.replace(file)  # atomically
    return file


def _key():
    """A hash of everything that the compiled file depends on."""
    cpu = [platform.machine()]
    if (info := Path("/proc/cpuinfo")).exists():
        told = ("flags", "Features", "model", "CPU part")  # of the first core
        lines = info.read_text().partition("\n\n")[0].splitlines()
        cpu += [line for line in lines if line.startswith(told)]
    return hashlib.sha256(SOURCE.read_bytes() + repr([FLAGS, cpu]).encode()).hexdigest()[:16]


def _take(lock, deadline):
    """Wait until no other process compiles: a lock ends with the process that holds it."""
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NotCompiled("another process takes too long to compile it") from None
            time.sleep(0.05)


def _compile(file, deadline):
    given = shlex.split(os.environ.get("CXX", ""))  # may include flags
    compiler = next(filter(shutil.which, given[:1] or COMPILERS), None)
    if compiler is None:
        raise NotCompiled(f"there is no C++ compiler ({', '.join(given[:1] or COMPILERS)})")
    # a file instead of a pipe: subprocesses of a killed compiler may hold a pipe open
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            done = subprocess.run(
                [compiler, *given[1:], *FLAGS, str(SOURCE), "-o", str(file)],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                timeout=max(1.0, deadline - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            raise NotCompiled(f"{compiler} takes too long") from None
        if done.returncode:
            said.seek(0)
            wrong = next((line for line in said if "error" in line), "it gives no reason").strip()
            raise NotCompiled(f"{compiler} rejects step.cpp: {wrong}")


# ---- 2. matrices

FP32, FP16, BYTES, NIBBLES = range(4)  # Kind of step.cpp


class _Matrix(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("kind", "N", "K", "offset")),
        *((name, c_void_p) for name in ("panels", "scale", "bias")),
    ]


class Library:
    """The functions of the compiled file, and matrices in the layout that it reads."""

    def __init__(self, functions: ctypes.CDLL):
        self.lanes = functions.lanes()
        self.product, self.stages = functions.product, functions.stages
        self.product.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64]
        self.stages.argtypes = [c_void_p, c_void_p, c_int64, c_int64]
        self.product.restype = self.stages.restype = None

    def floats(
        self, weight: torch.Tensor, bias: torch.Tensor | None, summed: bool = False
    ) -> "NativeLinear":
        """weight (N, K) fp32, kept in 16 bits if that is accurate enough."""
        N, K = weight.shape
        kind, kept = (FP16, weight.half()) if half_is_enough(weight) else (FP32, weight)
        panels = self._padded(kept).view(-1, self.lanes, K).transpose(1, 2)
        return NativeLinear(self, (kind, N, K, 0), panels, None, bias, summed)

    def int8(
        self, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, summed: bool
    ) -> "NativeLinear":
        """values int8 (N, K), scale fp32 (N, 1), as Int8Linear."""
        N, K = values.shape
        values = F.pad(values, (0, -K % 4)).view(torch.uint8) ^ 128  # adds 128
        panels = self._padded(values).view(-1, self.lanes, (K + 3) // 4, 4).transpose(1, 2)
        return NativeLinear(self, (BYTES, N, K, 0), panels, scale[:, 0], bias, summed)

    def int4(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        summed: bool,
        offset: int,
        columns: int,
    ) -> "NativeLinear":
        """packed uint8 (N, G · 16), scale fp32 (N, G), as Int4Linear; `columns` inputs."""
        N, G = scale.shape
        eights = packed.contiguous().view(torch.int32)  # of a little-endian CPU
        panels = self._padded(eights).view(-1, self.lanes, eights.shape[1]).transpose(1, 2)
        scale = self._padded(scale).view(-1, self.lanes, G).transpose(1, 2)
        return NativeLinear(self, (NIBBLES, N, columns, offset), panels, scale, bias, summed)

    def _padded(self, rows):
        return F.pad(rows, (0, 0, 0, -len(rows) % self.lanes))


class NativeLinear:
    """y = x·Wᵀ + b in fp32, equivalent to Linear, Int8Linear or Int4Linear."""

    def __init__(
        self,
        library: Library,
        sizes: tuple[int, int, int, int],
        panels: torch.Tensor,
        scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        summed: bool,
    ):
        self.library, self.summed, self.threads = library, summed, torch.get_num_threads()
        self.kind, self.outputs, self.inputs, _ = sizes
        self.panels = panels.contiguous()
        self.scale, self.bias = (t if t is None else t.contiguous() for t in (scale, bias))
        self.matrix = _Matrix(*sizes, *map(_address, (self.panels, self.scale, self.bias)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., N)"""
        x, scale = x.contiguous(), None
        if self.summed and self.kind == BYTES:  # a row's scale over all ranks, as in Int8Linear
            scale = x.abs().amax(dim=-1)
            dist.all_reduce(scale, op=dist.ReduceOp.MAX)
            scale.div_(INT8.highest)
        y = x.new_empty(*x.shape[:-1], self.outputs)
        self.library.product(
            ctypes.addressof(self.matrix), x.data_ptr(), x.numel() // self.inputs,
            _address(scale), y.data_ptr(), self.threads,
        )
        if self.summed:
            dist.all_reduce(y)
        return y


def _address(tensor):
    return None if tensor is None else tensor.data_ptr()


# ---- 3. a step


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm")),
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("keys", "values")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("threads", "C", "H", "K", "D", "M", "W")),
        ("eps", c_double), *((name, c_void_p) for name in ("turns", "blocks", "layers")),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        ("B", c_int64),
        *((name, c_void_p) for name in ("slots", "positions")),
        *((name, c_void_p) for name in ("x", "y", "h", "wide", "narrow", "scale")),
    ]


class Step:
    """All layers of one rank for one token in each of some slots.

    A layer has four stages: up to the output of attention, its output projection, up to the output
    of the MLP's activation, its down projection. A single rank runs all stages of all layers in one
    call; with several ranks, each call ends where they must communicate, with the same collectives
    as in PyTorch.

    blocks   of model.py, whose matrices are NativeLinear;   cache   its KVCache, fp32
    """

    def __init__(self, library: Library, config: GPTConfig, blocks: Sequence, cache: Any, tp: int):
        self.stages = library.stages
        K, _, D = cache.layers[0].keys.shape[1:]
        slots, W = cache.blocks.shape
        C, H = config.hidden_size, config.heads // tp
        M = blocks[0].feed_forward.down_proj.inputs
        self.blocks, self.turns = blocks, torch.view_as_real(cache.turns).contiguous()
        self.table = cache.blocks
        layers = (_Layer * len(blocks))(*map(_layer, blocks, cache.layers))
        self.model = _Model(
            torch.get_num_threads(), C, H, K, D, M, W, config.norm_eps,
            self.turns.data_ptr(), self.table.data_ptr(), ctypes.addressof(layers),
        )
        self.layers = layers  # kept alive, because the model points to them
        widths = C, C, max((H + 2 * K) * D, 2 * M), max(H * D, M)
        self.y, *self.room = (torch.empty(slots, width) for width in widths)
        self.scale = torch.empty(slots)
        self.plan = list(self._plan(4 * len(blocks), tp))

    def _plan(self, stages, tp):
        """(first stage, last stage + 1, tensor to all-reduce, reduction) of each call."""
        if tp == 1:
            yield 0, stages, None, None
            return
        for first in range(0, stages, 2):
            block = self.blocks[first // 4]
            product = block.feed_forward.down_proj if first % 4 else block.self_attn.o_proj
            middle = first
            if product.kind == BYTES:
                middle = first + 1
                yield first, middle, self.scale, dist.ReduceOp.MAX
            yield middle, first + 2, self.y, dist.ReduceOp.SUM

    def __call__(
        self, x: torch.Tensor, slots: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        """x (B, C), changed in place, of these slots' tokens at these positions -> (B, C)."""
        B = len(slots)
        numbers = c_int64 * B
        slots, positions = numbers(*slots), numbers(*positions)
        y, tensors = self.y[:B].zero_(), (x, self.y, *self.room, self.scale)
        now = _Pass(
            B, ctypes.addressof(slots), ctypes.addressof(positions), *map(_address, tensors)
        )
        model, now_at = ctypes.addressof(self.model), ctypes.addressof(now)
        for first, last, shared, how in self.plan:
            self.stages(model, now_at, first, last)
            if shared is not None:
                dist.all_reduce(shared[:B], op=how)
        return x.add_(y)


def _layer(block, kept):
    attention, mlp = block.self_attn, block.feed_forward
    return _Layer(
        block.input_layernorm.weight.data_ptr(), block.post_attention_layernorm.weight.data_ptr(),
        attention.qkv_proj.matrix, attention.o_proj.matrix, mlp.gate_up_proj.matrix,
        mlp.down_proj.matrix, kept.keys.data_ptr(), kept.values.data_ptr(),
    )
