"""Given: an answer's kernels in Triton's interpreter, and what its call may do beside launching.

answer = interpreted(answer)
with alone("first call"):      # no thread, no process, no reading by address
    answer.function(x, out)
"""

import _thread
import contextlib
import functools
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from utils.course.assertions import NotHere, Wrong
from utils.course.runner import load_answer

LIBRARY = ("utils.kernels.adamw", "utils.kernels.rms_norm", "torch.compile", "torch.nn")
# what Python tells of (`sys.audit`): a call goes to another process, or to a raw address
PROCESS, ADDRESS = "a process is started", "the host asks for a number by its address"
ELSEWHERE = {
    "os.fork": PROCESS, "os.posix_spawn": PROCESS, "subprocess.Popen": PROCESS,
    "ctypes.cdata": ADDRESS, "ctypes.cdata/buffer": ADDRESS, "ctypes.string_at": ADDRESS,
}

TOO_FAR = (
    "Has a place more than 31 bits? `.to(tl.int64)` before the product, or\n"
    "`tl.cast(row, tl.int64)` for the number of a loop."
)

_folder = Path()  # of the answer: its kernels stand there
_elsewhere: list[str] | None = None  # what the call that is looked at has done elsewhere
_audited = False


def there() -> None:
    """Raises NotHere, with what to do, where the Triton language is not installed."""
    try:
        importlib.import_module("utils.kernels.language")
    except ImportError as error:
        raise NotHere(str(error)) from None


def interpreted(answer: types.ModuleType) -> types.ModuleType:
    """The answer, in a process whose kernels are interpreted. A rank has Triton from its forkserver
    in whichever of its two modes; in the other one it is imported anew, which takes 0.1 s."""
    global _folder
    from triton.runtime.interpreter import InterpretedFunction

    _folder = Path(answer.__file__).parent
    if isinstance(sys.modules["triton.language"].cdiv, InterpretedFunction):
        return answer
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        ours = name.startswith("utils.kernels")
        if ours or (f"{name}.".startswith("triton.") and not name.startswith("triton._C")):
            del sys.modules[name]
    return load_answer(Path(answer.__file__))


def forbid(kernel: Any) -> None:
    """Raises Wrong unless the kernel stands in the answer's folder."""
    file = Path(kernel.fn.__code__.co_filename)
    if file.parent != _folder:
        raise Wrong(
            f"{kernel.fn.__name__} of {file.name} is launched: that is the library, and this "
            "exercise is to be done by hand."
        )


@contextlib.contextmanager
def alone(case: str) -> Iterator[None]:
    """Raises Wrong where what stands inside works on another thread or in another process, where
    nobody would look, or asks the host for numbers by their address."""
    global _elsewhere, _audited
    if not _audited:
        _audited = True
        sys.addaudithook(_audit)
    before, _elsewhere = _elsewhere, []
    try:
        with (
            mock.patch.object(threading.Thread, "start", _no_thread),
            mock.patch.object(_thread, "start_new_thread", _no_thread),
        ):
            yield
    finally:
        seen, _elsewhere = _elsewhere, before
        if seen:  # whatever the answer has made of it
            raise Wrong(f"{case}: {seen[0]}. All is to be done by the launches of this call.")


def _audit(event: str, _) -> None:
    if _elsewhere is not None and event in ELSEWHERE:
        _refuse(ELSEWHERE[event])


def _no_thread(*_) -> None:
    _refuse("a thread is started")


def _refuse(what: str) -> None:
    _elsewhere.append(what)
    raise Wrong(what)


def splat(_, kind, scalar):
    """One number for a block. The interpreter's own forgets that a comparison is a bool."""
    from triton.runtime.interpreter import TensorHandle

    full = np.full(kind.shape, scalar.data.ravel()[0], dtype=scalar.data.dtype)
    return TensorHandle(full, scalar.dtype.scalar)


def typed_range(*ends: Any, step: Any = None, **_: Any) -> Iterable:
    """`range` and `tl.range` of a kernel: numbers of the type that the compiler gives them, with 64
    bits where one end has them. The interpreter's own are Python's, of which a product has 32."""
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    if step is not None:
        ends = (*(0, *ends)[-2:], step)
    if not any(isinstance(end, semantic.tensor) for end in ends):
        return range(*ends)
    kinds = (semantic.to_tensor(end).dtype for end in ends)
    kind = functools.reduce(semantic.integer_promote_impl, kinds)
    return (semantic.cast(semantic.to_tensor(number), kind) for number in range(*ends))


def patched_once() -> Callable:
    """The interpreter's own looks through its language at each `tl.sum`; this one once a file."""
    from triton.runtime import interpreter

    patch_language, done = interpreter._patch_lang, set()

    def patch_once(function):
        if id(function.__globals__) in done:
            return interpreter._LangPatchScope()
        done.add(id(function.__globals__))
        scope = patch_language(function)
        for module in (interpreter.tl, sys.modules.get(function.__module__, interpreter.tl)):
            scope.set_attr(module, "range", typed_range)
        return scope

    patch_once.done = done
    return patch_once


def short(index: tuple) -> str:
    used = [i for i in index[1:] if i]
    return str(tuple(index)) if used else str(index[0])


def counted(number: int, what: str) -> str:
    """ "1 launch", "2 launches", "1,000 numbers"."""
    ending = "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{ending * (number != 1)}"
