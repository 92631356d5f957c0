"""Given: Triton's interpreter, which reports each load and store of an answer's kernels.

    answer = interpreted(answer)
    with watched(lambda program, addresses, size, stores, undefined: …):
        answer.function(x, out)
"""

import contextlib
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from utils.course.assertions import NotHere, Wrong
from utils.course.runner import load_answer

LIBRARY = ("utils.kernels.adamw", "utils.kernels.rms_norm", "torch.compile", "torch.nn")
FAR = 2**30  # bytes
MASK = "What does the mask say there, and how far apart are the elements of this tensor?"
TOO_FAR = (
    "Does an offset exceed 31 bits? Use `.to(tl.int64)` before the product, or\n"
    "`tl.cast(row, tl.int64)` for a loop's index."
)


def there() -> None:
    """Raise NotHere, which says what to do, if the Triton language is not installed."""
    try:
        importlib.import_module("utils.kernels.language")
    except ImportError as error:
        raise NotHere(str(error)) from None


def interpreted(answer: types.ModuleType) -> types.ModuleType:
    """The answer, loaded so that its kernels are interpreted. A rank inherits Triton from its
    forkserver, interpreted or compiled; if compiled, Triton is imported again, in 0.1 s."""
    from triton.runtime.interpreter import InterpretedFunction

    if isinstance(sys.modules["triton.language"].cdiv, InterpretedFunction):
        return getattr(answer, "interpreted", answer)
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        ours = name.startswith("utils.kernels")
        if ours or (f"{name}.".startswith("triton.") and not name.startswith("triton._C")):
            del sys.modules[name]
    answer.interpreted = load_answer(Path(answer.__file__))
    return answer.interpreted


@contextlib.contextmanager
def watched(saw: Callable, memory: bool = True) -> Iterator[None]:
    """Inside `with`, call saw(program, addresses, size, stores, undefined) for each load and store,
    before it uses an address. size: bytes per element. undefined: the load masks off some lanes
    without `other`; on a GPU these hold any value, here NaN or the largest integer. memory: whether
    the addresses have memory; if not, loads return ones, stores do nothing, and only the last
    iteration of a loop runs. Raises Wrong at an atomic operation."""
    from triton.runtime import interpreter

    builder, patch = interpreter.InterpreterBuilder, mock.patch.object
    load, store = builder.create_masked_load, builder.create_masked_store

    def tell(this, pointers, mask, stores, named=True):
        on = np.asarray(getattr(mask, "data", mask))  # a block pointer's is no array
        on = np.broadcast_to(on, pointers.data.shape)
        undefined = not (named or on.all())
        addresses, size = pointers.data[on].astype(np.int64), pointers.get_element_ty()
        saw(tuple(this.grid_idx), addresses, size.primitive_bitwidth // 8, stores, undefined)
        return undefined

    def watched_load(this, pointers, mask, other, *options):
        undefined = tell(this, pointers, mask, False, other is not None)
        kind = pointers.get_element_ty()
        dtype, value = interpreter._get_np_dtype(kind), 1
        if memory and not undefined:
            return load(this, pointers, mask, other, *options)
        if undefined:
            value = np.nan if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max
        filled = interpreter.TensorHandle(np.full_like(pointers.data, value, dtype=dtype), kind)
        return load(this, pointers, mask, filled, *options) if memory else filled

    def watched_store(this, pointers, value, mask, *options):
        tell(this, pointers, mask, True)
        return store(this, pointers, value, mask, *options) if memory else None

    def atomic(*_):
        raise Wrong(
            "an atomic operation. Programs run in any order, so a sum of fractions would have\n"
            "different last digits each time, and replicas would diverge."
        )

    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (builder, "create_masked_load", watched_load),
            (builder, "create_masked_store", watched_store),
            (builder, "create_atomic_rmw", atomic),
            (builder, "create_atomic_cas", atomic),
            (builder, "create_splat", splat),
            (interpreter, "_patch_lang", patched_once(memory)),
            # tensors are on the CPU or have no memory: skip the copies to it and back
            (interpreter.GridExecutor, "_init_args_hst", lambda _, *given: given),
            (interpreter.GridExecutor, "_restore_args_dev", lambda *_: None),
        ):
            stack.enter_context(patch(owner, name, new))
        stack.enter_context(np.errstate(all="ignore"))
        yield


def run(launch: Callable[[], Any]) -> Any:
    """Return the launch's result, or raise the original error: the interpreter wraps it once per
    function."""
    try:
        return launch()
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        raise error from None


# ---- where the interpreter differs from the compiler


def splat(_, kind, scalar):
    """A block filled with one value. The interpreter's own forgets that a comparison is a bool."""
    from triton.runtime.interpreter import TensorHandle

    full = np.full(kind.shape, scalar.data.ravel()[0], dtype=scalar.data.dtype)
    return TensorHandle(full, scalar.dtype.scalar)


def typed_range(whole: bool, *ends: Any, step: Any = None, **_: Any) -> Iterable:
    """A kernel's `range` and `tl.range`, with indices of the compiler's type: 64 bits if one end
    has them. The interpreter yields Python integers, whose products have 32 bits. whole: run
    all iterations, not only the last."""
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    if step is not None:
        ends = (*(0, *ends)[-2:], step)
    if not any(isinstance(end, semantic.tensor) for end in ends):
        return range(*ends)
    kinds = (semantic.to_tensor(end).dtype for end in ends)
    kind = functools.reduce(semantic.integer_promote_impl, kinds)
    numbers = range(*ends)[0 if whole else -1 :]
    return (semantic.cast(semantic.to_tensor(number), kind) for number in numbers)


def patched_once(whole: bool) -> Callable:
    """The interpreter patches its whole language at each `tl.sum`; this does so once per file and
    launch."""
    from triton.runtime import interpreter

    patch_language, done = interpreter._patch_lang, set()

    def patch_once(function):
        if id(function.__globals__) in done:
            return interpreter._LangPatchScope()
        done.add(id(function.__globals__))
        scope = patch_language(function)
        for module in (interpreter.tl, sys.modules.get(function.__module__, interpreter.tl)):
            scope.set_attr(module, "range", functools.partial(typed_range, whole))
        restore = scope.restore
        scope.restore = lambda: (restore(), done.clear())
        return scope

    return patch_once


# ---- messages


def span(begin: int, tensor: torch.Tensor) -> tuple[int, int, int]:
    """First address of a tensor at `begin`, the first after its end, and bytes per element."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + (last + 1) * tensor.itemsize, tensor.itemsize


def lost(program: tuple, kernel: str, stores: bool, at: int, spans: dict[str, tuple]) -> str:
    """Describe an address that holds no element of these tensors. spans: {name: its `span`}."""

    def apart(name):
        return max(spans[name][0] - at, at - spans[name][1] + 1, 0)

    name = min(spans, key=apart)
    begin, _, size = spans[name]
    return (
        f"program {program} of {kernel} {'stores to' if stores else 'loads from'} the first element"
        f" of {name} {(at - begin) // size:+,}, where {name} has none.\n"
        f"{TOO_FAR if apart(name) > FAR else MASK}"
    )
