"""Given: what an answer launches on a GPU, without one: its tensors are on the device "meta".

launches = dry(1, lambda: answer.function(meta, meta))  # 1 launch, in which no kernel runs
inside(launches)               # addresses of its first and its last program
codes = wide(launches, [least])                         # what an H100 would execute
"""

import contextlib
import math
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from labs.support.kernels.interpreter import (
    TOO_FAR,
    alone,
    counted,
    forbid,
    patched_once,
    short,
    splat,
)
from labs.support.kernels.traced import Moved, distance
from utils.course.assertions import Wrong

GRID = (2**31 - 1, 65_535, 65_535)  # programs that CUDA launches along each dimension, at most
LOADS, STORES = "loads from", "stores to"
ENOUGH = 64  # loads and stores of a program of a huge launch that are looked at
H100 = types.SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132)


@dataclass
class Launch:
    """kernel: under `@triton.jit`; grid: as it was given; arguments and named: of the call."""

    kernel: Any
    grid: Any
    arguments: tuple
    named: dict

    @property
    def size(self) -> tuple[int, ...]:
        """Programs along each dimension of the grid."""
        given = dict(zip(self.kernel.arg_names, self.arguments)) | self.named
        return tuple(self.grid(given) if callable(self.grid) else self.grid)

    @property
    def programs(self) -> int:
        """How many they are."""
        return math.prod(self.size)

    @property
    def warps(self) -> int:
        """Of each program."""
        return self.named.get("num_warps", 4)

    def machine_code(self) -> Any:
        """What an H100 would execute: `utils.kernels.machine_code`."""
        from utils.kernels import machine_code

        parameters = set(self.kernel.arg_names)
        named = {name: value for name, value in self.named.items() if name in parameters}
        try:
            return machine_code(self.kernel.fn, *self.arguments, **named, num_warps=self.warps)
        except ValueError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise Wrong("\n".join(lines[:8])) from None


def dry(right: int, call: Callable[[], Any], moved: int = 0) -> list[Launch]:
    """The `right` launches of `call`, whose tensors are on the device "meta": no kernel runs.

    A tensor says there that it is on a GPU. moved: bytes that torch's own operators may move.
    """
    from triton.runtime.interpreter import InterpretedFunction

    launches = []

    def run(self, *arguments, grid, warmup=False, **named):
        forbid(self)
        launches.append(Launch(self, grid, arguments, named))

    patches = (
        mock.patch.object(InterpretedFunction, "run", run),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)),
        mock.patch.object(torch.Tensor, "is_meta", property(lambda _: False)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: H100),
    )
    look = Moved()
    try:
        with contextlib.ExitStack() as stack:
            for context in (alone("on a GPU"), *patches, look):
                stack.enter_context(context)
            call()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise Wrong(
            "the function looks at a number that the device has yet to compute, so the host would "
            f"wait for it:\n{str(error).splitlines()[0][:100]}"
        ) from None
    if len(launches) != right:
        made = counted(len(launches), "launch")
        raise Wrong(f"{made}, and {right} {'is' if right == 1 else 'are'} right.")
    if look.moved > moved:
        raise Wrong(
            f"on a GPU torch's own operators move {look.moved:,} bytes beside the kernels. Which "
            "of them\ngoes over all numbers?"
        )
    for launch in launches:
        for axis, (programs, most) in enumerate(zip(launch.size, GRID)):
            if programs > most:
                raise Wrong(
                    f"{launch.kernel.fn.__name__} is launched with {programs:,} programs along "
                    f"axis {axis} of its grid, and a GPU allows {most:,} there."
                )
    return launches


def own(made: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    """Nothing that is made lies where something is that was given; both may be on "meta"."""
    for result, tensor in made.items():
        for name, other in given.items():
            if tensor.untyped_storage() is other.untyped_storage():
                raise Wrong(f"{result} lies in the memory of {name}, which is not to be changed.")


def inside(launches: list[Launch], enough: int = ENOUGH, loads: float = math.inf) -> None:
    """The first and the last program of each launch, whose tensors have no memory, loads from and
    stores to its tensors only. The first ENOUGH loads and stores are looked at, `enough` of the
    last program. loads: numbers that a program loads for each that it stores, at most."""
    for launch in launches:
        size = launch.size + (1,) * (3 - len(launch.size))
        last = tuple(programs - 1 for programs in size)
        for index, most in {(0, 0, 0): ENOUGH, last: enough}.items():
            _reach(launch, size, index, most, loads)


def _reach(launch: Launch, size: tuple, index: tuple, enough: int, loads: float) -> None:
    """Runs one program, which finds ones wherever it loads."""
    from triton.runtime import interpreter

    spans, left, counts = [], [enough], {LOADS: 0, STORES: 0}

    def place(value):
        if not isinstance(value, torch.Tensor):
            return value
        last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride()))
        begin = (len(spans) + 1) << 48
        spans.append((begin, begin + (last + 1) * value.element_size(), value.element_size()))
        return _Address(begin, value.dtype)

    arguments = [place(value) for value in launch.arguments]
    named = {name: place(value) for name, value in launch.named.items()}

    def look(pointers, mask, done):
        on = np.broadcast_to(np.asarray(getattr(mask, "data", mask)), pointers.data.shape)
        places = pointers.data if on.all() else pointers.data[on]
        counts[done] += places.size
        ends = [int(end) for end in (places.min(), places.max())] if places.size else []
        for at in ends:  # one access is to one tensor
            begin, end, unit = min(spans, key=lambda span: distance(at, span[:2]))
            if begin <= at < end:
                continue
            apart = counted(distance(at, (begin, end)) // unit, "number")
            where = "before the first" if at < begin else "behind the last"
            raise Wrong(
                f"program {short(index)} of {math.prod(size):,} of {launch.kernel.fn.__name__} "
                f"{done} an address {apart} {where} of a tensor.\n{TOO_FAR}"
            )
        left[0] -= 1
        if not left[0]:
            raise _Enough

    def load(this, pointers, mask, *_):
        look(pointers, mask, LOADS)
        kind = pointers.get_element_ty()
        ones = np.ones_like(pointers.data, dtype=interpreter._get_np_dtype(kind))
        return interpreter.TensorHandle(ones, kind)

    def only_this(this, *_):
        if this.grid_idx == index:
            raise _Enough
        this.grid_idx = index

    patch, builder = mock.patch.object, interpreter.InterpreterBuilder
    interpreter.interpreter_builder.grid_idx = None
    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (builder, "create_masked_load", load),
            (builder, "create_masked_store", lambda _, pointers, __, mask, *___:
             look(pointers, mask, STORES)),
            (builder, "create_splat", splat),
            (builder, "set_grid_idx", only_this),
            (interpreter, "_patch_lang", patched_once()),
            (interpreter.GridExecutor, "_init_args_hst", lambda _, *given: given),
            (interpreter.GridExecutor, "_restore_args_dev", lambda *_: None),
        ):
            stack.enter_context(patch(owner, name, new))
        stack.enter_context(np.errstate(all="ignore"))
        try:
            launch.kernel.run(*arguments, grid=launch.grid, warmup=False, **named)
        except _Enough:
            pass
        except Exception as error:
            while error.__cause__ is not None:
                error = error.__cause__
            raise error from None
    if left[0] > 0 and counts[LOADS] > loads * counts[STORES]:  # else it has not ended
        raise Wrong(
            f"program {short(index)} of {math.prod(size):,} of {launch.kernel.fn.__name__} loads "
            f"{counts[LOADS]:,} numbers to store {counts[STORES]:,}, and {loads:g} for each are "
            "enough."
        )


class _Enough(BaseException):
    """A program has shown enough. No Exception: the interpreter wraps those."""


@dataclass
class _Address:
    """What a kernel gets for a tensor: there is nothing at it."""

    begin: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.begin


def wide(launches: list[Launch], stored: list[int], spills: bool = False) -> list:
    """The machine code of all launches, whose loads and stores move 128 bits for a thread.

    stored: bytes that each launch has to store, at least; spills: whether registers may go through
    memory.
    """
    codes = []
    for launch, least in zip(launches, stored):
        code = launch.machine_code()
        most = sum(bits // 8 * count for bits, count in code.stores.items())
        most *= code.threads * launch.programs
        if most < least and not _has_loop(code.sass):
            raise Wrong(
                f"{launch.programs:,} programs of {code.kernel} store {most:,} bytes, and all "
                f"numbers have {least:,}: are there enough programs, and are blocks long enough?"
            )
        narrow = [bits for bits in (*code.loads, *code.stores) if bits < 128]
        if narrow:
            raise Wrong(
                f"for an H100 {code.kernel} has loads {code.loads} and stores "
                f"{code.stores} ({{bits: instructions of a thread}}).\nAll can have 128 bits: how "
                f"many numbers has each of its {code.threads} threads, and what does the mask know?"
            )
        if code.spills and not spills:
            raise Wrong(
                f"in {code.kernel} {code.spills} bytes of a thread do not fit into "
                "registers, and go through memory: smaller blocks, or more warps?"
            )
        codes.append(code)
    return codes


def _has_loop(sass: str) -> bool:
    """Whether an instruction jumps back. The last one of each kernel jumps to itself."""
    jumps = re.findall(r"^([0-9a-f]+)  .*\bBRA\S* .*?0x([0-9a-f]+)", sass, re.M)
    return any(int(to, 16) < int(place, 16) for place, to in jumps)
