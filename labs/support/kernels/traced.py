"""Given: the loads and stores of kernels in Triton's interpreter, address by address, and the bytes
that torch's own operators move.

    with Traced(x=x, out=out) as traced:
        answer.function(x, out)
    traced.count(False, x)         # loads of elements of x
    traced.kernels, traced.moved   # each launch's kernel; bytes that torch's operators moved
"""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from labs.support.kernels.interpreter import lost, run, span, watched
from utils.course.assertions import Wrong
from utils.course.observe import Look
from utils.measure.traffic import tensors_in
from utils.private_api import unwatched

# operators that move no data: they return an uninitialized tensor or a view
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "detach",
    "alias", "t", "transpose", "permute", "expand", "slice", "select", "as_strided", "unsqueeze",
    "squeeze", "split", "split_with_sizes", "unbind", "_unsafe_view", "_reshape_alias", "set_",
}

NOTHING = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool)


class Moved(Look):
    """Count the bytes that torch's operators read and write inside `with`, in `moved`."""

    moved = 0

    def saw(self, func: Callable, given: Any, outputs: bool) -> None:
        super().saw(func, given, outputs)
        if func.__name__.split(".")[0] not in FREE:
            places = {(id(t.untyped_storage()), t.storage_offset()): t for t in tensors_in(given)}
            self.moved += sum(tensor.nbytes for tensor in places.values())


class Traced(Moved):
    """Observe each load and store of the kernels that run inside `with`. inputs: their tensors by
    name.

    Raises Wrong if a kernel touches memory outside the elements of its tensors, or if two
    programs of a launch touch the same element and one stores it: programs run in any order.
    """

    def __init__(self, **inputs: torch.Tensor):
        super().__init__(**inputs)
        self.kernels: list[str] = []  # one name per launch
        self.programs = 0  # in all launches
        self.traffic = 0  # bytes that kernels loaded and stored
        self.undefined = False  # whether a load masked off lanes without `other`
        self._tensors, self._patches = dict(inputs), contextlib.ExitStack()
        self._all = [NOTHING]  # (program, address, whether it is a store) per element

    def __enter__(self):
        from triton.runtime.interpreter import InterpretedFunction

        launch, seen = InterpretedFunction.run, self

        def traced_launch(this, *arguments, grid, warmup=False, **named):
            with unwatched():
                seen._begins(this, dict(zip(this.arg_names, arguments)) | named)
                run(lambda: launch(this, *arguments, grid=grid, warmup=warmup, **named))
                seen._ends()

        self._patches.enter_context(watched(self._touched))
        self._patches.enter_context(mock.patch.object(InterpretedFunction, "run", traced_launch))
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self._patches.close()
        self._tensors.clear()

    def count(self, stores: bool, *tensors: torch.Tensor) -> int:
        """The number of loads, or of stores, of elements of these tensors."""
        _, places, stored = map(np.concatenate, zip(*self._all))
        return int(_among(places[stored == stores], _numbers(*tensors)).sum())

    def beside(self, *tensors: torch.Tensor) -> int:
        """The number of loads and stores of elements of other tensors."""
        named = self.count(False, *tensors) + self.count(True, *tensors)
        return sum(len(places) for _, places, _ in self._all) - named

    def hint(self, found: Any, right: torch.Tensor) -> str:
        """A hint about where a wrong NaN may come from; "" if there is none."""
        same_shape = getattr(found, "shape", None) == right.shape
        if not same_shape or not (found.isnan() > right.isnan()).any():
            return ""
        if self.undefined:
            return "A load gives NaN where its mask is false and `other=` is missing: which one?"
        return "Is an intermediate result infinite, such as e to the power of a large number?"

    # ---- a launch

    def _begins(self, kernel, arguments):
        self.kernels.append(kernel.fn.__name__)
        known = {id(tensor) for tensor in self._tensors.values()}
        for name, given in arguments.items():
            if isinstance(given, torch.Tensor) and id(given) not in known:
                self._tensors[f"{name} of {self.kernels[-1]}"] = given
        self._known, self._first = _numbers(*self._tensors.values()), len(self._all)

    def _touched(self, program, addresses, size, stores, undefined):
        self.undefined |= undefined
        self.traffic += size * len(addresses)
        outside = addresses[~_among(addresses, self._known)]
        if len(outside):
            spans = {name: span(t.data_ptr(), t) for name, t in self._tensors.items()}
            raise Wrong(lost(program, self.kernels[-1], stores, int(outside[0]), spans))
        who = program[0] + (program[1] << 32) + (program[2] << 48)
        kind = np.full(len(addresses), stores)
        self._all.append((np.full(len(addresses), who), addresses, kind))

    def _ends(self):
        """Raise Wrong if the launch's programs conflict."""
        who, places, stored = map(np.concatenate, zip(NOTHING, *self._all[self._first :]))
        self.programs += len(np.unique(who))
        order = np.lexsort((who, places))
        one, next_one = order[:-1], order[1:]
        shared = places[one][(places[one] == places[next_one]) & (who[one] != who[next_one])]
        if _among(places[stored], shared).any():
            raise Wrong(
                f"two programs of {self.kernels[-1]} touch the same element, and one stores it. "
                "Programs run in any order:\nwhich comes last is random."
            )


def _numbers(*tensors: torch.Tensor) -> np.ndarray:
    """The addresses of all elements, sorted."""
    found = [np.empty(0, np.int64)]
    for x in tensors:
        axes = np.ix_(*(np.arange(n) * stride for n, stride in zip(x.shape, x.stride())))
        found.append(np.ravel(x.data_ptr() + x.itemsize * sum(axes)))
    return np.unique(np.concatenate(found))


def _among(places: np.ndarray, known: np.ndarray) -> np.ndarray:
    """A mask of the addresses that are in `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(places), bool)
    return known[np.minimum(np.searchsorted(known, places), len(known) - 1)] == places
