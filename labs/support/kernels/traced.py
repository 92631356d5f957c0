"""Given: how a check watches kernels at work: in Triton's interpreter, address by address.

    answer = interpreted(answer)
    with Traced(case, x=x, out=out) as traced:
        answer.function(x, out)
    traced.counts("x")             # (loads, stores) of each number: (n,) and (n,)
    traced.launches, traced.moved  # how many; bytes that torch's own operators have moved

A kernel gets plain addresses, and an interpreter that follows a wrong one ends with its process. So
each address is looked at before it is used: it must be that of a number of a tensor that the kernel
was given. Where a load's mask is false and nothing is said about it, a GPU gives anything; here it
is NaN, or the largest whole number.
"""

import contextlib
from collections.abc import Callable, Iterator
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
from utils.course.assertions import Wrong, bitwise_equal
from utils.course.observe import Look
from utils.private_api import unwatched

FAR = 2**30  # bytes
# operators that move no number: they make a tensor without values, or another view
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "detach",
    "alias", "t", "transpose", "permute", "expand", "slice", "select", "as_strided", "unsqueeze",
    "squeeze", "split", "split_with_sizes", "unbind", "_unsafe_view", "_reshape_alias", "set_",
}
# operators whose result the host has to know
ASKING = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique"}


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
        self.anything = False  # whether a load has given what nobody has named
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
        patch_once = patched_once()

        def watched_load(this, pointers, mask, other, *options):
            on = np.asarray(mask.data)  # of a block pointer it is no array
            seen._saw(this, pointers, on, False)
            if other is None and not on.all():
                other, seen.anything = _anything(interpreter, pointers), True
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
            forbid(this)
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
            (builder, "create_splat", splat),
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

    def hint(self, found: Any, right: torch.Tensor) -> str:
        """Where NaN may come from that is not right."""
        if not isinstance(found, torch.Tensor) or found.shape != right.shape:
            return ""
        if not (found.isnan() & ~right.isnan()).any():
            return ""
        if self.anything:
            return "A load gives NaN where its mask is false and no `other=` is named: which one?"
        return "Is anything infinite on the way, such as e to the power of a large number?"

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
                                                    for t in self._named.values()]))
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
        name = min(spans, key=lambda name: distance(place, spans[name]))
        begin, end, size = spans[name]
        if place < begin:
            apart = counted((begin - place + size - 1) // size, "number")
            where = f"{apart} before the first of {name}"
        elif place >= end:
            where = f"{counted((place - end) // size + 1, 'number')} behind the last of {name}"
        else:
            where = f"between two numbers of {name}"
        hint = "What does the mask say there, and how far apart are the numbers of this tensor?"
        if distance(place, spans[name]) > FAR:
            hint = TOO_FAR
        done = "stores to" if stores else "loads from"
        raise Wrong(
            f"{self._case}: program {short(builder.grid_idx)} of {self.kernels[-1]} {done} an "
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


def distance(place: int, span: tuple) -> int:
    return max(span[0] - place, place - span[1], 0)


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
