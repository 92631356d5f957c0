"""Given: what an answer launches on a GPU, without one: its tensors are on the device "meta".

    launches = dry(lambda: answer.function(meta, meta))  # no kernel runs
    inside(launches)               # addresses of the first and the last program of each
    codes = wide(launches)         # what an H100 would execute
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from labs.support.kernels.interpreter import counted, lost, run, watched
from labs.support.kernels.traced import Moved
from utils.course.assertions import Wrong

GRID = (2**31 - 1, 65_535, 65_535)  # programs that CUDA launches along each dimension, at most
ENOUGH = 64  # loads and stores of a program of a huge launch that are looked at


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
        size = tuple(self.grid(given) if callable(self.grid) else self.grid)
        return size + (1,) * (3 - len(size))

    @property
    def programs(self) -> int:
        """How many they are."""
        return math.prod(self.size)

    def machine_code(self) -> Any:
        """What an H100 would execute: `utils.kernels.machine_code`."""
        from utils.kernels import machine_code

        known = {n: value for n, value in self.named.items() if n in self.kernel.arg_names}
        warps = self.named.get("num_warps", 4)
        try:
            return machine_code(self.kernel.fn, *self.arguments, **known, num_warps=warps)
        except ValueError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise Wrong("\n".join(lines[:8])) from None


def dry(call: Callable[[], Any], right: int = 1, moved: int = 0) -> list[Launch]:
    """The `right` launches of `call`, whose tensors are on the device "meta": no kernel runs.
    moved: bytes that torch's own operators may move."""
    from triton.runtime.interpreter import InterpretedFunction

    launches, look = [], Moved()

    def note(self, *arguments, grid, warmup=False, **named):
        launches.append(Launch(self, grid, arguments, named))

    try:
        with mock.patch.object(InterpretedFunction, "run", note), look:
            call()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if "meta" not in str(error):
            raise
        raise Wrong(
            "the function looks at a number that the device has yet to compute, so the host would "
            f"wait for it:\n{str(error).splitlines()[0][:100]}"
        ) from None
    if len(launches) != right:
        raise Wrong(f"{counted(len(launches), 'launch')}, where {right} will do.")
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


@dataclass
class Address:
    """What a kernel gets for a tensor that has no memory."""

    begin: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.begin


class Enough(BaseException):
    """A program has shown enough. No Exception: the interpreter wraps those."""


def inside(launches: list[Launch], enough: int = ENOUGH) -> None:
    """The first and the last program of each launch load from and store to its tensors only; so
    many loads and stores of each are looked at."""
    for launch in launches:
        for index in dict.fromkeys([(0, 0, 0), tuple(programs - 1 for programs in launch.size)]):
            _reach(launch, index, enough)


def _reach(launch: Launch, index: tuple, enough: int) -> None:
    """Runs one program, which finds ones wherever it loads."""
    from triton.runtime import interpreter

    names = [*launch.kernel.arg_names, *launch.named]
    spans, left, begun = {}, [enough], []

    def placed(name, value):
        if not isinstance(value, torch.Tensor):
            return value
        last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride()))
        begin = (len(spans) + 1) << 48
        spans[name] = begin, begin + (last + 1) * value.itemsize, value.itemsize
        return Address(begin, value.dtype)

    def touched(program, addresses, size, stores, undefined):
        for at in (addresses.min(), addresses.max()) if len(addresses) else ():
            if not any(begin <= at < end for begin, end, _ in spans.values()):
                words = lost(program, launch.kernel.fn.__name__, stores, int(at), spans)
                raise Wrong(f"of {launch.programs:,} programs, {words}")
        left[0] -= 1
        if not left[0]:
            raise Enough

    def only_this(this, *_):  # each program of the grid in turn: the first one becomes this one
        if begun:
            raise Enough
        begun.append(index)
        this.grid_idx = index

    arguments = [placed(name, value) for name, value in zip(names, launch.arguments)]
    named = {name: placed(name, value) for name, value in launch.named.items()}
    one = mock.patch.object(interpreter.InterpreterBuilder, "set_grid_idx", only_this)
    with watched(touched, memory=False), one, contextlib.suppress(Enough):
        run(lambda: launch.kernel.run(*arguments, grid=launch.grid, warmup=False, **named))


def wide(launches: list[Launch], spills: bool = False) -> list:
    """The machine code of all launches, whose loads and stores move 128 bits for a thread. spills:
    whether registers may go through memory."""
    codes = [launch.machine_code() for launch in launches]
    for code in codes:
        if any(bits < 128 for bits in (*code.loads, *code.stores)):
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
    return codes
