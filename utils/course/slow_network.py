"""A network on which every asynchronous result comes late: it is there after `wait()`, not before.

An answer that does not wait is often lucky: on one machine messages are fast. Inside `late()` the
result of each asynchronous call goes to separate memory and is copied into the caller's tensor
when the caller waits on it; a message that is changed before its send was waited on is detected.
Polling for a result instead of waiting takes PATIENCE seconds longer, once. What is sent, and
when, does not change.
"""

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from utils.course.assertions import Wrong, bitwise_equal

PATIENCE = 3.0  # seconds; below HANG, so that polling succeeds in time
# function of torch.distributed -> the argument that its result is written to
RESULTS = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "irecv": "tensor",
    "scatter": "tensor",
    "gather": "gather_list",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "all_gather_single": "output_tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "reduce_scatter_single": "output",
    "all_to_all": "output_tensor_list",
    "all_to_all_single": "output",
}


class LateWork:
    """A `Work` whose results reach the caller's tensors when it is waited on.

    has_come: whether the network has been polled for long enough.
    """

    def __init__(self, work: Any, deliver: Callable[[], None], has_come: Callable[[], bool]):
        self._work, self._deliver, self._done = work, deliver, False
        self._has_come = has_come

    def wait(self, *args: Any, **keywords: Any) -> bool:
        """As `Work.wait`."""
        done = self._work.wait(*args, **keywords)
        self._arrive()
        return done

    def is_completed(self) -> bool:
        """As `Work.is_completed`, only later."""
        done = self._done or (self._has_come() and self._work.is_completed())
        if done:
            self._arrive()
        return done

    def get_future(self) -> Any:
        """As `Work.get_future`."""
        return LateFuture(self._work.get_future(), self)

    def _arrive(self):
        if not self._done:
            self._done = True
            self._deliver()

    def __getattr__(self, name):
        return getattr(self._work, name)


class LateFuture:
    """The `Future` of a late work, whose results arrive with a wait or before a callback."""

    def __init__(self, future: Any, work: LateWork):
        self._future, self._work = future, work
        self.done = work.is_completed

    def wait(self) -> Any:
        """As `Future.wait`."""
        value = self._future.wait()
        self._work._arrive()
        return value

    def value(self) -> Any:
        """As `Future.value`."""
        value = self._future.value()
        self._work._arrive()
        return value

    def then(self, callback: Callable) -> Any:
        """As `Future.then`."""

        def arrived(future):
            self._work._arrive()
            return callback(future)

        return self._future.then(arrived)

    def add_done_callback(self, callback: Callable) -> None:
        """As `Future.add_done_callback`."""
        self.then(callback)


@contextlib.contextmanager
def late() -> Iterator[None]:
    """Make asynchronous calls of torch.distributed late inside `with`. Load the answer inside."""
    before = {name: getattr(dist, name) for name in (*RESULTS, "isend") if hasattr(dist, name)}
    asked = []  # when the caller polled

    def has_come() -> bool:
        asked.append(time.monotonic())
        return asked[-1] - asked[0] > PATIENCE

    for name, function in before.items():
        if name == "isend":
            wrapped = _late_send(function, has_come)
        else:
            wrapped = _late(function, RESULTS[name], has_come)
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, wrapped)
    try:
        yield
    finally:
        for name, function in before.items():
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, function)


def _late(function: Callable, result: str, has_come: Callable[[], bool]) -> Callable:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **keywords):
        given = signature.bind(*args, **keywords).arguments
        places = given.get(result)
        if places is None or not (given.get("async_op") or function.__name__ == "irecv"):
            return function(*args, **keywords)
        single = isinstance(places, torch.Tensor)
        places = [places] if single else list(places)
        hidden = [place.detach().clone() for place in places]
        work = function(**given | {result: hidden[0] if single else hidden})

        def deliver():
            with torch.no_grad():
                for place, arrived in zip(places, hidden):
                    place.copy_(arrived)

        return work if work is None else LateWork(work, deliver, has_come)

    return call


def _late_send(function: Callable, has_come: Callable[[], bool]) -> Callable:
    @functools.wraps(function)
    def call(tensor, *args, **keywords):
        message = tensor.detach().clone()

        def deliver():
            if not bitwise_equal(tensor, message):
                raise Wrong(
                    "a tensor was changed after isend and before its wait(): which of the two "
                    "is sent is a matter of luck."
                )

        work = function(tensor, *args, **keywords)
        return work if work is None else LateWork(work, deliver, has_come)

    return call
