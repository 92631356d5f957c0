"""Given: the launches of an answer, observed without a GPU: its tensors are on the device "meta".

call: a function (answer, *shape) that calls the answer with such tensors of this shape.
"""

import contextlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from labs.support.kernels.interpreter import interpreted, lost, run, span, watched
from utils.course.assertions import Wrong

ENOUGH = 64  # loads and stores to observe in a program without memory


def dry(answer: ModuleType, call: Callable, shape: tuple[int, ...]) -> list[tuple]:
    """(kernel, programs in each of three dimensions, positional and keyword arguments) of each
    launch. No kernel runs. Raises Wrong if the host waits for a value from the device."""
    answer, launches = interpreted(answer), []

    def note(self, *arguments, grid, warmup=False, **named):
        if callable(grid):
            grid = grid(dict(zip(self.arg_names, arguments)) | named)
        launches.append((self, (*grid, 1, 1)[:3], arguments, named))

    from triton.runtime.interpreter import InterpretedFunction

    try:
        with mock.patch.object(InterpretedFunction, "run", note):
            call(answer, *shape)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if "meta" not in str(error):
            raise
        raise Wrong(
            "the function reads a value that the device has yet to compute, so the host would wait "
            f"for it:\n{str(error).splitlines()[0][:100]}"
        ) from None
    return launches


class Enough(BaseException):
    """Ends a program that has been observed enough. The interpreter would wrap an Exception."""


def inside(answer: ModuleType, call: Callable, shape: tuple) -> None:
    """Check that the last program of each launch touches only its own tensors. Each of its loads
    returns ones."""
    for launch in dry(answer, call, shape):
        _inside(*launch)


def _inside(kernel: Any, grid: tuple, arguments: tuple, named: dict) -> None:
    from triton.runtime import interpreter

    last, spans = tuple(programs - 1 for programs in grid), {}
    begun, seen = [], []

    def placed(name, value):
        if not isinstance(value, torch.Tensor):
            return value
        begin = (len(spans) + 1) << 48
        spans[name] = span(begin, value)
        return SimpleNamespace(data_ptr=lambda: begin, dtype=value.dtype)

    def touched(program, addresses, size, stores, undefined):
        for at in (addresses.min(), addresses.max()) if len(addresses) else ():
            if not any(begin <= at < end for begin, end, _ in spans.values()):
                raise Wrong(lost(program, kernel.fn.__name__, stores, int(at), spans))
        seen.append(len(addresses))
        if len(seen) == ENOUGH:
            raise Enough

    def only_the_last(this, *_):  # the grid's first program becomes its last
        if begun:
            raise Enough
        begun.append(last)
        this.grid_idx = last

    arguments = [placed(name, value) for name, value in zip(kernel.arg_names, arguments)]
    named = {name: placed(name, value) for name, value in named.items()}
    one = mock.patch.object(interpreter.InterpreterBuilder, "set_grid_idx", only_the_last)
    with watched(touched, memory=False), one, contextlib.suppress(Enough):
        run(lambda: kernel.run(*arguments, grid=grid, warmup=False, **named))


def wide(answer: ModuleType, call: Callable, shape: tuple) -> list:
    """The machine code of all launches. Raises Wrong if a load or store moves fewer than 128 bits
    per thread, or if registers spill."""
    from utils.kernels import machine_code

    codes = []
    for kernel, _, arguments, named in dry(answer, call, shape):
        known = {name: x for name, x in named.items() if name in (*kernel.arg_names, "num_warps")}
        code = machine_code(kernel.fn, *arguments, **known)
        if any(bits < 128 for bits in (*code.loads, *code.stores)):
            raise Wrong(
                f"for an H100 {code.kernel} has loads {code.loads} and stores "
                f"{code.stores} ({{bits: instructions per thread}}).\nAll can have 128 bits: how "
                f"many elements does each of its {code.threads} threads have, and what is known of "
                "the mask?"
            )
        if code.spills:
            raise Wrong(
                f"in {code.kernel} {code.spills} bytes per thread do not fit into registers "
                "and spill to memory: smaller blocks, or more warps?"
            )
        codes.append(code)
    return codes
