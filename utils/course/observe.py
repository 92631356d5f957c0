"""What a check sees of an answer's run on one rank: messages, new tensors, products, inputs.

    with Look(x=x, dy=dy) as look:
        y = answer.function(x)
    look.events                    # each collective, send and receive, with its bytes
    look.largest                   # bytes of the largest tensor that was allocated
    look.alive                     # bytes that were allocated and are held now
    look.peak                      # … their maximum over time
    look.products                  # each matrix product, and which half of the step it was in
    look.changed()                 # ["x"]: inputs that have changed
    look.spare(y)                  # further bytes of a larger tensor, made here, that y views
    del y; look.kept()             # bytes that were allocated and are still held

One mode of PyTorch's dispatcher sees every operator of the thread and of its backward passes: that
of `utils.measure.traffic`, which counts the messages.
"""

import functools
import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from utils.course.assertions import bitwise_equal
from utils.measure.traffic import Traffic, tensors_in
from utils.private_api import running_backward, unwatched
from utils.ranks.pool import PRELOADED

PRELOADED.append(__name__)
LETS_GO = 1.0  # seconds in which a backend releases a message that has arrived
# operator -> the positions of its two factors among the arguments
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1)} | {
    "addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2), "addbmm": (1, 2), "linear": (0, 1),
}


def looks(seconds: float = LETS_GO) -> Iterator[int]:
    """The numbers of repeated looks at what a backend still holds, a hundredth of a second apart,
    for `seconds`. Looks count, not the clock: while a busy machine suspends this process, it
    suspends the backend's thread too."""
    for number in range(round(100 * seconds)):
        yield number
        time.sleep(0.01)


@dataclass(frozen=True)
class Product:
    """A matrix product: the shapes of its two factors, and its half of the training step."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    backward: bool  # True: inside a backward pass

    @property
    def multiplications(self) -> int:
        """The number of scalar multiplications."""
        batch = self.left[0] if len(self.left) == 3 else 1
        rows = self.left[-2] if len(self.left) > 1 else 1
        return batch * rows * self.left[-1] * (self.right[-1] if len(self.right) > 1 else 1)


class Look(Traffic):
    """Observes what happens inside `with`. inputs: tensors, or nested lists of them, by name."""

    def __init__(self, **inputs: Any):
        super().__init__()
        self._inputs = {name: list(tensors_in(given)) for name, given in inputs.items()}
        with unwatched():
            self._before = {n: [t.detach().clone() for t in ts] for n, ts in self._inputs.items()}
        self._made: dict[int, weakref.ref] = {}  # by the id of a storage: unique while it lives
        self._given: dict[int, weakref.ref] = {}  # existed before
        self._alive = [0]  # a list of its own: a weak reference's callback must not hold this Look
        self.products: list[Product] = []
        self.largest = self.peak = 0  # bytes

    @property
    def alive(self) -> int:
        """Bytes that were allocated and are held now."""
        return self._alive[0]

    def changed(self) -> list[str]:
        """The names of inputs whose bits have changed."""
        with unwatched():
            return [
                name
                for name, tensors in self._inputs.items()
                if not all(map(bitwise_equal, tensors, self._before[name]))
            ]

    def spare(self, *results: Any) -> int:
        """Bytes that `results` keep in memory in addition to their own: the rest of larger tensors,
        made inside `with`, of which they are views."""
        used = Counter()
        for tensor in tensors_in(list(results)):
            used[id(tensor.untyped_storage())] += tensor.numel() * tensor.element_size()
        storages = [(made(), used[key]) for key, made in self._made.items() if key in used]
        return sum(
            max(0, storage.nbytes() - own) for storage, own in storages if storage is not None
        )

    def kept(self, *results: Any, allowed: int = 0) -> int:
        """Bytes that were allocated inside `with` and are still held, except by `results`.

        Call it when the caller has released everything else: names, graphs, gradients. allowed:
        bytes that may be held, such as a graph's; it does not wait for fewer.
        """
        ours = {id(tensor.untyped_storage()) for tensor in tensors_in(list(results))}
        for look in looks():
            alive = [made() for key, made in self._made.items() if key not in ours]
            held = sum(storage.nbytes() for storage in alive if storage is not None)
            del alive
            if held <= allowed:
                break
            if look == 10:  # nothing has released it yet: it may be a cycle
                gc.collect()
        return held

    def saw(self, func: Callable, given: Any, outputs: bool) -> None:
        super().saw(func, given, outputs)
        name = func.__name__.split(".")[0]
        if not outputs and name in PRODUCTS and func.namespace == "aten":
            left, right = (tuple(given[0][place].shape) for place in PRODUCTS[name])
            self.products.append(Product(left, right, running_backward() != -1))
        for tensor in tensors_in(given):
            storage = tensor.untyped_storage()
            if _known(self._made, storage) or _known(self._given, storage):
                continue
            if not outputs:
                self._given[id(storage)] = weakref.ref(storage)
                continue
            size = storage.nbytes()
            freed = functools.partial(_freed, self._alive, size)
            self._made[id(storage)] = weakref.ref(storage, freed)
            self._alive[0] += size
            self.largest, self.peak = max(self.largest, size), max(self.peak, self.alive)


def _freed(alive: list[int], size: int, _: weakref.ref) -> None:
    alive[0] -= size


def _known(storages: dict[int, weakref.ref], storage: torch.UntypedStorage) -> bool:
    return id(storage) in storages and storages[id(storage)]() is storage
