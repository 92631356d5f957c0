"""Given: what kernels load and store in Triton's interpreter, address by address, and what torch's
own operators move beside them.

    with Traced(case, x=x, out=out) as traced:
        answer.function(x, out)
    traced.often(x)                # (loads, stores) of each number: (n,) and (n,)
    traced.kernels, traced.moved   # of each launch; bytes that torch's own operators have moved
"""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from labs.support.kernels.interpreter import lost, run, watched
from utils.course.assertions import Wrong
from utils.course.observe import Look
from utils.measure.traffic import tensors_in
from utils.private_api import unwatched

# operators that move no number: they make a tensor without values, or another view
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "detach",
    "alias", "t", "transpose", "permute", "expand", "slice", "select", "as_strided", "unsqueeze",
    "squeeze", "split", "split_with_sizes", "unbind", "_unsafe_view", "_reshape_alias", "set_",
}
# operators whose result the host has to know
ASKING = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique"}


class Moved(Look):
    """Counts what torch's operators read and write inside `with`. moved: bytes; asked: whether the
    host has asked for a number."""

    moved, asked = 0, False

    def saw(self, func: Callable, given: Any, outputs: bool) -> None:
        super().saw(func, given, outputs)
        name = func.__name__.split(".")[0]
        self.asked |= name in ASKING
        if name not in FREE:
            places = {(id(t.untyped_storage()), t.storage_offset()): t for t in tensors_in(given)}
            self.moved += sum(tensor.nbytes for tensor in places.values())


class Traced(Moved):
    """Sees each load and store of the kernels that run inside `with`. inputs: the tensors that the
    kernels are about, by name.

    Raises Wrong where a kernel touches anything but numbers of the tensors that it was given, where
    two programs of a launch touch one number of which one stores it (programs run in any order), at
    an atomic operation, and where the host asks for a number.
    """

    def __init__(self, case: str, **inputs: torch.Tensor):
        super().__init__(**inputs)
        self.kernels: list[str] = []  # of each launch
        self.programs = 0  # of all launches
        self.storing = 0  # programs of the last launch that store something
        self.traffic = 0  # bytes that they have loaded and stored
        self.undefined = False  # whether a load has given what nobody has named
        self._case, self._tensors = case, dict(inputs)
        self._log: list = []  # of this launch: (program, addresses, whether it stores)
        self._done: dict[bool, list] = {False: [], True: []}  # addresses of all launches
        self._patches = contextlib.ExitStack()

    def __enter__(self):
        from triton.runtime import interpreter

        function, builder = interpreter.InterpretedFunction, interpreter.InterpreterBuilder
        launch, seen = function.run, self

        def traced_launch(this, *arguments, grid, warmup=False, **named):
            with unwatched():
                seen._begins(this, (*arguments, *named.values()))
                run(lambda: launch(this, *arguments, grid=grid, warmup=warmup, **named))
                seen._ends()

        def atomic(this, *_):
            raise Wrong(
                f"{seen._case}: an atomic operation. Programs come in any order, so a sum of "
                "fractions would have\nother last digits each time, and replicas would part."
            )

        self._patches.enter_context(watched(self._touched))
        for owner, name, new in (
            (function, "run", traced_launch),
            (builder, "create_atomic_rmw", atomic),
            (builder, "create_atomic_cas", atomic),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, new))
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self._patches.close()
        self._tensors.clear()
        if raised[0] is None and self.asked:
            raise Wrong(
                f"{self._case}: the host asks for a number (`.item()`, `if`, `float`), and waits "
                "for it.\nWhat is to be known of the numbers, kernels find out."
            )

    def often(self, tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """How often each of its numbers was loaded and stored: two of its shape. What stands for
        several numbers (stride 0) is shared out among them."""
        own, back, owners = np.unique(_addresses(tensor), return_inverse=True, return_counts=True)
        counts = []
        for stores in (False, True):
            found, times = np.unique(self._all(stores), return_counts=True)
            each, there = np.zeros(len(own)), _among(own, found)
            each[there] = times[np.searchsorted(found, own[there])]
            counts.append((each / owners)[back].reshape(tensor.shape))
        return tuple(counts)

    def beside(self, *tensors: torch.Tensor) -> int:
        """Loads and stores of anything else."""
        named = np.unique(np.concatenate([_addresses(tensor).ravel() for tensor in tensors]))
        return sum(int((~_among(self._all(stores), named)).sum()) for stores in (False, True))

    def hint(self, found: Any, right: torch.Tensor) -> str:
        """Where NaN may come from that is not right."""
        if not isinstance(found, torch.Tensor) or found.shape != right.shape:
            return ""
        if not (found.isnan() & ~right.isnan()).any():
            return ""
        if self.undefined:
            return "A load gives NaN where its mask is false and no `other=` is named: which one?"
        return "Is anything infinite on the way, such as e to the power of a large number?"

    def _all(self, stores: bool) -> np.ndarray:
        return np.concatenate([*self._done[stores], np.empty(0, np.int64)])

    # ---- a launch

    def _begins(self, kernel, arguments):
        self.kernels.append(kernel.fn.__name__)
        known = {id(tensor) for tensor in self._tensors.values()}
        for number, given in enumerate(arguments):
            if isinstance(given, torch.Tensor) and id(given) not in known:
                name = kernel.arg_names[number] if number < len(kernel.arg_names) else "a tensor"
                self._tensors[f"{name} of launch {len(self.kernels)}"] = given
        every = [_addresses(tensor).ravel() for tensor in self._tensors.values()]
        self._known = np.unique(np.concatenate(every))
        self._log.clear()

    def _touched(self, program, addresses, size, stores, undefined):
        self.undefined |= undefined
        self.traffic += size * len(addresses)
        outside = addresses[~_among(addresses, self._known)]
        if len(outside):
            spans = {}
            for name, tensor in self._tensors.items():
                every = _addresses(tensor)
                spans[name] = int(every.min()), int(every.max()) + tensor.itemsize, tensor.itemsize
            words = lost(program, self.kernels[-1], stores, int(outside[0]), spans)
            raise Wrong(f"{self._case}: {words}")
        self._log.append((program, addresses, stores))

    def _ends(self):
        """Did its programs get into each other's way?"""
        numbers = {program: i for i, program in enumerate(dict.fromkeys(p for p, *_ in self._log))}
        lengths = [len(addresses) for _, addresses, _ in self._log]
        places = np.concatenate([np.empty(0, np.int64), *(places for _, places, _ in self._log)])
        who = np.repeat([numbers[program] for program, *_ in self._log], lengths).astype(np.int64)
        stored = np.repeat([stores for *_, stores in self._log], lengths).astype(bool)
        self.programs += len(numbers)
        self.storing = len(np.unique(who[stored]))
        of_each = np.unique(places * max(1, len(numbers)) + who) // max(1, len(numbers))
        shared = of_each[1:][of_each[1:] == of_each[:-1]]
        if _among(places[stored], shared).any():
            raise Wrong(
                f"{self._case}: two programs of {self.kernels[-1]} touch the same number, and one "
                "stores it. Programs run in any order:\nwhich comes last is chance."
            )
        for stores in (False, True):
            self._done[stores].append(places[stored == stores])


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    """Of each number: an array of its shape."""
    at = np.full((1,) * tensor.ndim, tensor.data_ptr(), np.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        steps = np.arange(size, dtype=np.int64) * stride * tensor.element_size()
        at = at + steps.reshape([-1 if other == axis else 1 for other in range(tensor.ndim)])
    return at


def _among(places: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which of the places are in `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(places), bool)
    return known[np.minimum(np.searchsorted(known, places), len(known) - 1)] == places
