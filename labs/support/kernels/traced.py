"""Given: how a check watches kernels at work: in Triton's interpreter, address by address.

    answer = interpreted(answer)
    with Traced(case, x=x, out=out) as traced:
        answer.function(x, out)
    traced.counts("x")             # (loads, stores) of each number: (n,) and (n,)
    traced.launches, traced.moved  # how many; bytes that torch's own operators have moved

    launches = dry(1, lambda: answer.function(meta, meta))  # 1 launch, on the device "meta"
    inside(launches)               # addresses of its first and its last program
    codes = wide(launches, [least])

A kernel gets plain addresses, and an interpreter that follows a wrong one ends with its process. So
each address is looked at before it is used: it must be that of a number of a tensor that the kernel
was given. Where a load's mask is false and nothing is said about it, a GPU gives anything; here it
is NaN, or the largest whole number.
"""

import _thread
import contextlib
import importlib
import math
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from utils.course.expect import NotHere, Wrong, bitwise_equal
from utils.course.look import Look
from utils.course.trial import load_answer
from utils.private_api import unwatched

LIBRARY = ("utils.kernels.adamw", "utils.kernels.rms_norm", "torch.compile", "torch.nn")
FAR = 2**30  # bytes
GRID = (2**31 - 1, 65_535, 65_535)  # programs that CUDA launches along each dimension, at most
ENOUGH = 64  # loads and stores of a program of a huge launch that are looked at
# what Python tells of (`sys.audit`): a call goes to another process, or to a raw address
PROCESS, ADDRESS = "a process is started", "the host asks for a number by its address"
ELSEWHERE = {
    "os.fork": PROCESS, "os.posix_spawn": PROCESS, "subprocess.Popen": PROCESS,
    "ctypes.cdata": ADDRESS, "ctypes.cdata/buffer": ADDRESS, "ctypes.string_at": ADDRESS,
}  # fmt: skip
H100 = types.SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132)
# operators that move no number: they make a tensor without values, or another view
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "detach",
    "alias", "t", "transpose", "permute", "expand", "slice", "select", "as_strided", "unsqueeze",
    "squeeze", "split", "split_with_sizes", "unbind", "_unsafe_view", "_reshape_alias", "set_",
}  # fmt: skip
# operators whose result the host has to know
ASKING = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique"}


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


def _by_hand(kernel: Any) -> None:
    """Raises Wrong unless the kernel stands in the answer's folder."""
    file = Path(kernel.fn.__code__.co_filename)
    if file.parent != _folder:
        raise Wrong(
            f"{kernel.fn.__name__} of {file.name} is launched: that is the library, and this "
            "exercise is to be done by hand."
        )


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


def dry(right: int, call: Callable[[], Any], moved: int = 0) -> list[Launch]:
    """The `right` launches of `call`, whose tensors are on the device "meta": no kernel runs.

    A tensor says there that it is on a GPU. moved: bytes that torch's own operators may move.
    """
    from triton.runtime.interpreter import InterpretedFunction

    launches = []

    def run(self, *arguments, grid, warmup=False, **named):
        _by_hand(self)
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
        raise Wrong(f"{len(launches)} launches, and {right} {'is' if right == 1 else 'are'} right.")
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


def inside(launches: list[Launch], enough: int = ENOUGH) -> None:
    """The first and the last program of each launch, whose tensors have no memory, loads from and
    stores to its tensors only. The first ENOUGH loads and stores are looked at, `enough` of the
    last program."""
    for launch in launches:
        size = launch.size + (1,) * (3 - len(launch.size))
        last = tuple(programs - 1 for programs in size)
        for index, most in {(0, 0, 0): ENOUGH, last: enough}.items():
            _reach(launch, size, index, most)


def _reach(launch: Launch, size: tuple, index: tuple, enough: int) -> None:
    """Runs one program, which finds ones wherever it loads."""
    from triton.runtime import interpreter

    spans, left = [], [enough]

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
        ends = [int(end) for end in (places.min(), places.max())] if places.size else []
        for at in ends:  # one access is to one tensor
            begin, end, unit = min(spans, key=lambda span: _distance(at, span[:2]))
            if begin <= at < end:
                continue
            where = "before the first" if at < begin else "behind the last"
            raise Wrong(
                f"program {_short(index)} of {math.prod(size):,} of {launch.kernel.fn.__name__} "
                f"{done} an address {_distance(at, (begin, end)) // unit:,} numbers {where} of a "
                "tensor.\nHas a place more than 31 bits? `.to(tl.int64)` before the product."
            )
        left[0] -= 1
        if not left[0]:
            raise _Enough

    def load(this, pointers, mask, *_):
        look(pointers, mask, "loads from")
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
             look(pointers, mask, "stores to")),
            (builder, "create_splat", _splat),
            (builder, "set_grid_idx", only_this),
            (interpreter, "_patch_lang", _patched_once()),
            (interpreter.GridExecutor, "_init_args_hst", lambda _, *given: given),
            (interpreter.GridExecutor, "_restore_args_dev", lambda *_: None),
        ):  # fmt: skip
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


def own_memory(case: str, *calls: list[torch.Tensor]) -> None:
    """The results of several calls, all of which are held, lie in different memory."""
    places = [{t.untyped_storage().data_ptr() for t in results} for results in calls]
    if any(one & other for i, one in enumerate(places) for other in places[:i]):
        raise Wrong(
            f"{case}: a result lies where the first call's result is, which somebody still holds: "
            "make new memory in each call."
        )


class Moved(Look):
    """Counts what torch's operators read and write inside `with`. moved: bytes; asked: whether the
    host has asked for a number."""

    moved, asked = 0, False

    def saw(self, func: Callable, given: Any, outputs: bool) -> None:
        super().saw(func, given, outputs)
        self.asked |= func.__name__.split(".")[0] in ASKING
        if func.__name__.split(".")[0] not in FREE:
            self.moved += sum({_place(t): t.nbytes for t in _tensors(given)}.values())


class Traced(Moved):
    """Sees each load and store of the kernels that run inside `with`, and what torch moves beside
    them. inputs: the tensors that the kernels are about, by name.

    Raises Wrong where a kernel touches any other number, where two programs of a launch touch one
    number of which one stores it (programs run in no order), at an atomic operation, and where a
    tensor of `inputs` is changed by anything but a kernel.
    """

    def __init__(self, case: str, **inputs: torch.Tensor):
        super().__init__(**inputs)
        self._case, self._named = case, inputs
        self.launches = 0
        self.kernels: list[str] = []
        self.numbers: list[list] = []  # that each launch gets from the host
        self.programs = 0  # of the last launch that store something
        self.scratch = 0  # numbers beside `inputs` that a program has touched, at most
        self._log: list = []  # of this launch: (program, whether it stores, places)
        self._total: dict[bool, list] = {False: [], True: []}
        self._beside: list[torch.Tensor] = []  # tensors that the answer has made
        self._state = self._values()
        self._left: dict[int, torch.UntypedStorage] = {}  # what the last launch left beside them
        self._patches = contextlib.ExitStack()

    def __enter__(self):
        from triton.runtime import interpreter

        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store
        run, seen = interpreter.InterpretedFunction.run, self
        patch_once = _patched_once()

        def watched_load(this, pointers, mask, other, *options):
            on = np.asarray(mask.data)  # of a block pointer it is no array
            seen._saw(this, pointers, on, False)
            if other is None and not on.all():
                other = _anything(interpreter, pointers)
            return load(this, pointers, mask, other, *options)

        def watched_store(this, pointers, value, mask, *options):
            seen._saw(this, pointers, np.asarray(mask.data), True)
            return store(this, pointers, value, mask, *options)

        def atomic(this, *_):
            raise Wrong(
                f"{seen._case}: an atomic operation. Programs come in any order, so a sum of "
                "fractions would have\nother last digits each time, and replicas would part."
            )

        def watched_run(this, *arguments, grid, warmup=False, **named):
            _by_hand(this)
            with unwatched():
                patch_once.done.clear()
                seen._begin(this, (*arguments, *named.values()))
                try:
                    run(this, *arguments, grid=grid, warmup=warmup, **named)
                except Exception as error:
                    while error.__cause__ is not None:  # the interpreter wraps it, once a function
                        error = error.__cause__
                    raise error from None
                seen._end()

        patch = mock.patch.object
        for owner, name, new in (
            (builder, "create_masked_load", watched_load),
            (builder, "create_masked_store", watched_store),
            (builder, "create_splat", _splat),
            (interpreter, "_patch_lang", patch_once),
            (builder, "create_atomic_rmw", atomic),
            (builder, "create_atomic_cas", atomic),
            (interpreter.InterpretedFunction, "run", watched_run),
            *(
                (torch.Tensor, name, _asking(self, torch.Tensor, name))
                for name in ("numpy", "tolist", "__array__", "__dlpack__")
            ),
            *(
                (torch.UntypedStorage, name, _asking(self, torch.UntypedStorage, name))
                for name in ("__getitem__", "tolist")
            ),
            # the tensors are on the CPU already: nothing has to be copied back
            (interpreter.GridExecutor, "_restore_args_dev", lambda *_: None),
        ):
            self._patches.enter_context(patch(owner, name, new))
        self._patches.enter_context(np.errstate(all="ignore"))
        self._patches.enter_context(alone(self._case))
        return super().__enter__()

    def __exit__(self, *raised):
        try:
            if raised[0] is None:
                if self.asked:
                    raise Wrong(
                        f"{self._case}: the host asks for a number (`.item()`, `if`, `float`, "
                        "`.numpy()`), and waits\nfor it. What is to be known of the numbers, "
                        "kernels find out."
                    )
                self._same_as_kernels_left_it()
        finally:
            super().__exit__(*raised)
            self._beside.clear()
            self._patches.close()

    def name(self, **results: torch.Tensor) -> None:
        """Counts these, which the answer has made, as the inputs are counted."""
        self._named |= results

    def as_stored(self, **results: torch.Tensor) -> None:
        """Raises Wrong unless these, which the answer has made, are what the last launch left."""
        for name, tensor in results.items():
            left = self._left.get(tensor.untyped_storage().data_ptr())
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            if left is None or not bitwise_equal(
                torch.empty(0, dtype=tensor.dtype).set_(left, *place), tensor.detach()
            ):
                raise Wrong(
                    f"{self._case}: {name} is not what the launch has left: it is changed, and not "
                    "by a kernel."
                )

    def let_go(self) -> None:
        """Holds no input from now on, so that `kept` tells what the answer holds."""
        for held in (self._named, self._inputs, self._before, self._state, self._left):
            held.clear()

    @property
    def traffic(self) -> int:
        """Bytes that the kernels have loaded and stored."""
        return self._unit * sum(len(places) for log in self._total.values() for places in log)

    def beside(self) -> int:
        """Loads and stores of what is neither an input nor named."""
        named = np.concatenate([_places(t, self._unit).ravel() for t in self._named.values()])
        every = np.concatenate([places for log in self._total.values() for places in log])
        return int((~_among(every, np.unique(named))).sum())

    def counts(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """How often each number of an input was loaded and stored: two of its shape."""
        places = _places(self._named[name], self._unit)
        return tuple(_count(self._total[stores], places) for stores in (False, True))

    # ---- a launch

    def _values(self):
        return {name: tensor.detach().clone() for name, tensor in self._named.items()}

    def _same_as_kernels_left_it(self):
        with unwatched():
            for name, tensor in self._named.items():
                if not bitwise_equal(tensor, self._state[name]):
                    raise Wrong(f"{self._case}: {name} is changed, and not by a kernel.")

    def _begin(self, kernel, arguments):
        self._same_as_kernels_left_it()
        self.launches += 1
        self.kernels.append(kernel.fn.__name__)
        self.numbers.append([given for given in arguments if isinstance(given, int | float)])
        own = {id(tensor) for tensor in self._named.values()}
        for given in arguments:
            if isinstance(given, torch.Tensor) and id(given) not in own:
                self._beside.append(given)
        tensors = [*self._named.values(), *self._beside]
        self._unit = min(tensor.element_size() for tensor in tensors)
        self._inputs_at = np.unique(np.concatenate([_places(t, self._unit).ravel()
                                                    for t in self._named.values()]))  # fmt: skip
        beside = [_places(t, self._unit).ravel() for t in self._beside]
        self._known = np.unique(np.concatenate([self._inputs_at, *beside]))
        self._log.clear()

    def _saw(self, builder, pointers, mask, stores):
        first = pointers.data[np.broadcast_to(mask, pointers.data.shape)].astype(np.int64)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        steps = np.arange(0, size, self._unit)
        places = (first[:, None] + steps).ravel() if len(steps) > 1 else first
        outside = ~_among(places, self._known)
        if outside.any():
            self._lost(builder, int(places[outside][0]), stores)
        self._log.append((tuple(builder.grid_idx), stores, places))

    def _lost(self, builder, place, stores):
        """An address of nothing that the kernel may touch."""
        spans = {}
        for name, tensor in self._named.items():
            at = _places(tensor, self._unit)
            spans[name] = int(at.min()), int(at.max()) + self._unit, tensor.element_size()
        name = min(spans, key=lambda name: _distance(place, spans[name]))
        begin, end, size = spans[name]
        if place < begin:
            where = f"{(begin - place + size - 1) // size:,} numbers before the first of {name}"
        elif place >= end:
            where = f"{(place - end) // size + 1:,} numbers behind the last of {name}"
        else:
            where = f"between two numbers of {name}"
        hint = "What does the mask say there, and how far apart are the numbers of this tensor?"
        if _distance(place, spans[name]) > FAR:
            hint = "Has the offset more than 31 bits? `.to(tl.int64)` before the product."
        done = "stores to" if stores else "loads from"
        raise Wrong(
            f"{self._case}: program {_short(builder.grid_idx)} of {self.kernels[-1]} {done} an "
            f"address {where}.\n{hint}"
        )

    def _end(self):
        """The launch has ended: did its programs get into each other's way?"""
        numbers = {p: i for i, p in enumerate(dict.fromkeys(p for p, *_ in self._log))}
        self.programs = len({p for p, stores, places in self._log if stores and len(places)})
        sides = {}
        touched = np.zeros(max(1, len(numbers)))  # numbers beside the inputs, by program
        for stores in (False, True):
            log = [(numbers[p], places) for p, kind, places in self._log if kind == stores]
            places = np.concatenate([places for _, places in log] or [np.empty(0, np.int64)])
            who = np.repeat([p for p, _ in log], [len(places) for _, places in log]).astype(int)
            beside = who[~_among(places, self._inputs_at)]
            touched += np.bincount(beside, minlength=len(touched))
            sides[stores] = places, who
            self._total[stores].append(places)
        self.scratch = max(self.scratch, int(touched.max()))
        stored, writer = sides[True]
        place, first = np.unique(stored, return_index=True)
        for places, who in (sides[True], sides[False]):
            both = _among(places, place)
            if (writer[first][np.searchsorted(place, places[both])] != who[both]).any():
                done = "store" if places is stored else "load and store"
                raise Wrong(
                    f"{self._case}: two programs of {self.kernels[-1]} {done} the same number. "
                    "Programs run in any order:\nwhich comes last is chance."
                )
        self._state = self._values()
        storages = (tensor.untyped_storage() for tensor in self._beside)
        self._left = {storage.data_ptr(): storage.clone() for storage in storages}


def once(
    case: str, traced: Traced, loads: dict[str, int], stores: dict[str, int], hint: str = ""
) -> None:
    """Each number of these inputs is loaded and stored so often, those of other inputs never."""
    if not traced.launches:
        raise Wrong(f"{case}: no kernel was launched.")
    for name in traced._named:
        for done, counts, right in zip(
            ("loaded", "stored"), traced.counts(name), (loads.get(name, 0), stores.get(name, 0))
        ):
            bad = counts != right
            if bad.any():
                place = tuple(int(i) for i in np.argwhere(bad)[0])
                raise Wrong(
                    f"{case}: {name}{list(place)} is {done} {_times(counts[place])}, and "
                    f"{_times(right)} is right ({int(bad.sum()):,} of {bad.size:,} numbers)."
                    + f"\n{hint}"
                    * bool(hint)
                )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(int(count), f"{int(count)} times")


def _places(tensor: torch.Tensor, unit: int) -> np.ndarray:
    """The address of each number; of numbers wider than `unit` bytes one of each unit."""
    at = np.full((1,) * tensor.ndim, tensor.data_ptr(), np.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        steps = np.arange(size, dtype=np.int64) * stride * tensor.element_size()
        at = at + steps.reshape([-1 if other == axis else 1 for other in range(tensor.ndim)])
    return at[..., None] + np.arange(0, tensor.element_size(), unit)


def _count(logs: list[np.ndarray], places: np.ndarray) -> np.ndarray:
    """How often each place is in the logs; a place that several numbers share is shared out."""
    every = np.concatenate([*logs, np.empty(0, np.int64)])
    found, times = np.unique(every, return_counts=True)
    own, back, owners = np.unique(places, return_inverse=True, return_counts=True)
    counts, inside = np.zeros(len(own)), _among(own, found)
    counts[inside] = times[np.searchsorted(found, own[inside])]
    return (counts / owners)[back].reshape(places.shape).max(-1)


def _among(places: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which of the places are in `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(places), bool)
    return known[np.minimum(np.searchsorted(known, places), len(known) - 1)] == places


def _distance(place: int, span: tuple) -> int:
    return max(span[0] - place, place - span[1], 0)


def _short(index: tuple) -> str:
    used = [i for i in index[1:] if i]
    return str(tuple(index)) if used else str(index[0])


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, dict):
        yield from _tensors(list(nested.values()))
    elif isinstance(nested, list | tuple):
        for item in nested:
            yield from _tensors(item)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where it lies; also where it has no memory."""
    return id(tensor.untyped_storage()), tensor.storage_offset()


def _asking(traced: Traced, owner: type, name: str) -> Callable:
    """A tensor's method that gives numbers to the host, which the dispatcher does not see."""
    method = getattr(owner, name)

    def asking(tensor, *args, **named):
        traced.asked = True
        return method(tensor, *args, **named)

    return asking


def _splat(_, kind, scalar):
    """One number for a block. The interpreter's own forgets that a comparison is a bool."""
    from triton.runtime.interpreter import TensorHandle

    full = np.full(kind.shape, scalar.data.ravel()[0], dtype=scalar.data.dtype)
    return TensorHandle(full, scalar.dtype.scalar)


def _patched_once() -> Callable:
    """The interpreter's own looks through its language at each `tl.sum`; this one once a file."""
    from triton.runtime import interpreter

    patch_language, done = interpreter._patch_lang, set()

    def patch_once(function):
        if id(function.__globals__) in done:
            return interpreter._LangPatchScope()
        done.add(id(function.__globals__))
        return patch_language(function)

    patch_once.done = done
    return patch_once


def _anything(interpreter, pointers):
    """What a load gives where its mask is false and no `other` is named."""
    kind = pointers.get_element_ty()
    dtype = interpreter._get_np_dtype(kind)
    if kind.is_bf16():
        value = 0x7FC0
    elif np.issubdtype(dtype, np.floating):
        value = np.nan
    else:
        value = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else True
    return interpreter.TensorHandle(np.full_like(pointers.data, value, dtype=dtype), kind)
