"""Count the communication of one rank: every collective, send and receive, with its bytes.

    with Traffic() as traffic:
        loss.backward()                     # DDP's all-reduces are counted too
    traffic.calls("all_reduce")             # 2
    traffic.payload("all_reduce")           # bytes of the tensors passed in
    traffic.sent()                          # bytes that this rank puts on the wire
    print(traffic)                          # the same as a table

How: every PyTorch collective, whatever code starts it, passes through PyTorch's dispatcher as an
operator of the `c10d` family, and a `TorchDispatchMode` sees all operators of its thread. Autograd
passes the mode on to the threads of the backward pass; callbacks of a collective's future (PowerSGD
chains its all-reduces this way) get a mode here. The mode costs a few microseconds per operator, so
count in one run and measure time in another.

The bytes sent are those of the bandwidth-optimal ring algorithms (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009; NVIDIA's nccl-tests,
doc/PERFORMANCE.md), not those of the backend: gloo's reduce-scatter, for example, sends more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from utils import private_api
from utils.private_api import (
    OperatorMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

# The dispatcher's names -> the names of torch.distributed. Both families are listed: `c10d` carries
# the calls of torch.distributed, DDP and FSDP, `_c10d_functional` those of DTensor and compilers.
NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "isend": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "irecv": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
FAMILIES = ("c10d", "_c10d_functional", "_dtensor")
OPERATIONS = tuple(dict.fromkeys(NAMES.values()))


@dataclass(frozen=True)
class Event:
    """One collective, send or receive of this rank, recorded when it starts."""

    op: str  # a name of OPERATIONS
    payload: int  # bytes of the tensors this rank passed in (receive: bytes of its buffer)
    sent: Fraction  # bytes that this rank sends to others, by the ring algorithm
    group_size: int  # number of ranks taking part
    asynchronous: bool  # True: the call returned before the result was available
    peer: int | None = None  # send and receive: the other rank, as numbered in the group
    started: float = field(default=0.0, compare=False)  # time.perf_counter(), seconds
    group: str = field(default="", compare=False)  # the process group's name


class Watching(OperatorMode):
    """Calls `saw(func, tensors, outputs)` before and after each operator of this thread.

    tensors are the operator's arguments (outputs=False) or its results (outputs=True), nested as
    they come. Backward passes that the thread starts are also seen, on whichever thread they run.
    A subclass may define `saw` itself.
    """

    def __init__(self, saw: Callable[..., None] | None = None):
        super().__init__()
        if saw is not None:
            self.saw = saw

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # a wrapper (DTensor …) first unfolds into its underlying operators
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a fake tensor is repeatedly asked for its device
            return func(*args, **kwargs)
        self.saw(func, (args, kwargs), outputs=False)
        result = func(*args, **kwargs)
        self.saw(func, result, outputs=True)
        return result


class _Counting(Watching):
    """Appends an event to `events` for each c10d operator of the thread that enters it."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def saw(self, func: Callable, given: Any, outputs: bool) -> None:
        if not outputs and func.namespace in FAMILIES:
            self.events += _events(func, *given)

    def counting_callbacks(self, then):
        """`Future.then`, but also counting in the callbacks, on whichever thread they run."""

        def counting_then(future, callback):
            def counted(done):
                modes = private_api.current_modes()
                if any(getattr(mode, "events", None) is self.events for mode in modes):
                    return callback(done)  # its thread is already counted
                with _Counting(self.events):
                    return callback(done)

            return then(future, counted)

        return counting_then


class Traffic(_Counting):
    """Counts the collectives and point-to-point messages that this rank starts inside `with`.

    `events` lists them in order. An object may be entered several times and continues counting.
    Only this rank is seen: with `Ranks`, open one on every rank. Only this thread is seen, with its
    backward passes and the callbacks of its collectives, but not the threads that you start.
    """

    def __init__(self) -> None:
        super().__init__([])
        self._then = []  # the outer Future.then, for each `with`

    def __enter__(self):
        future = private_api.future_class()
        self._then.append(future.then)
        future.then = self.counting_callbacks(self._then[-1])
        return super().__enter__()

    def __exit__(self, *exception):
        private_api.future_class().then = self._then.pop()
        return super().__exit__(*exception)

    def calls(self, op: str | None = None) -> int:
        """The number of calls of one operation, or of all: `traffic.calls("all_reduce")`."""
        return len(self._of(op))

    def payload(self, op: str | None = None) -> int:
        """Bytes of the tensors that this rank passed in: its input, before any splitting."""
        return sum(event.payload for event in self._of(op))

    def sent(self, op: str | None = None) -> int | float:
        """Bytes that this rank sends by the ring algorithm; an int if they are whole bytes.

        With N ranks and B bytes of payload: all-reduce 2(N-1)/N·B; reduce-scatter, all-to-all and
        a scatter's root (N-1)/N·B; all-gather (N-1)·B (B is one rank's shard); broadcast and reduce
        B on every rank of the chain except the last; gather B except on the root; send B.
        """
        total = sum((event.sent for event in self._of(op)), Fraction(0))
        return int(total) if total.denominator == 1 else float(total)

    def on(self, group: dist.ProcessGroup) -> list[Event]:
        """The events of one process group: `traffic.on(mesh.tp.group)`."""
        return [event for event in self.events if event.group == group.group_name]

    def _of(self, op: str | None) -> list[Event]:
        if op is not None and op not in OPERATIONS:
            raise ValueError(f"no operation is named {op!r}: use one of {', '.join(OPERATIONS)}")
        return [event for event in self.events if op in (None, event.op)]

    def __str__(self) -> str:
        if not self.events:
            return "no communication"
        ops = [op for op in OPERATIONS if self.calls(op)]
        rows = [(op, self.calls(op), self.payload(op), self.sent(op)) for op in ops]
        lines = [f"{'operation':<16}{'calls':>7}{'payload bytes':>16}{'bytes sent':>16}"]
        lines += [f"{op:<16}{n:>7,}{payload:>16,}{sent:>16,.0f}" for op, n, payload, sent in rows]
        return "\n".join(lines)


def _events(func, args: tuple, kwargs: dict) -> Iterator[Event]:
    """The events of one operator call, read from its arguments by the names in its schema."""
    name = func.__name__.split(".")[0]
    given = private_api.arguments(func, args, kwargs)
    functional = func.namespace != "c10d"
    now = time.perf_counter()

    if name == "batch_p2p_ops":  # several sends and receives in one operator
        group = _group(given)
        size = group.size()
        batch = zip(given["op_list"], given["peer_list"], given["tensors"], strict=True)
        for kind, peer, tensor in batch:
            op, payload = NAMES[kind], _bytes(tensor)
            sent = Fraction(payload * (op == "send"))
            yield Event(op, payload, sent, size, True, peer, now, group.group_name)
        return
    if name not in NAMES:  # a wait, a NaN check: nothing travels
        return

    op, group = NAMES[name], _group(given)
    payload = 0 if op == "barrier" else _bytes(_handed_over(given))
    yield Event(
        op=op,
        payload=payload,
        sent=_ring_bytes(op, payload, group, given),
        group_size=group.size(),
        asynchronous=functional or op in ("send", "recv") or bool(given.get("async_op", False)),
        peer=given.get("dst", given.get("src")) if op in ("send", "recv") else None,
        started=now,
        group=group.group_name,
    )


def _handed_over(given: dict):
    """This rank's input: what the schemas call input, inputs, tensors, tensor …"""
    names = ("input_tensors", "input_list", "input_tensor", "inputs", "input", "tensors", "tensor")
    return next(given[name] for name in names if name in given)


def _bytes(tensors) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)


def _group(given: dict) -> dist.ProcessGroup:
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return private_api.process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _ring_bytes(op: str, payload: int, group: dist.ProcessGroup, given: dict) -> Fraction:
    """Bytes that this rank sends; see `Traffic.sent` for the formulas."""
    size, rank = group.size(), group.rank()
    root = given.get("root_rank", given.get("src", 0))
    if op == "all_reduce":
        return Fraction(2 * (size - 1) * payload, size)
    if op == "all_gather":
        return Fraction((size - 1) * payload)
    if op == "broadcast":  # along the chain root, root + 1, …: the last rank passes nothing on
        return Fraction(payload * ((rank + 1) % size != root))
    if op == "reduce":  # the same chain backwards: it ends at the root
        return Fraction(payload * (rank != root))
    if op == "gather":
        return Fraction(payload * (rank != root))
    if op == "all_to_all":
        return _others_part(payload, size, rank, given)
    if op in ("reduce_scatter", "scatter"):  # a scatter's payload is 0 except on its root
        return Fraction((size - 1) * payload, size)
    return Fraction(payload * (op == "send"))


def _others_part(payload: int, size: int, rank: int, given: dict) -> Fraction:
    """All-to-all: the bytes for the other ranks, exact even if the splits differ in size."""
    if "input_tensors" in given:
        return Fraction(payload - _bytes(given["input_tensors"][rank]))
    splits = given.get("input_split_sizes")
    if not splits or sum(splits) == 0:  # no list: equal splits
        return Fraction((size - 1) * payload, size)
    return payload * Fraction(sum(splits) - splits[rank], sum(splits))


def tensors_in(nested: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in nested lists, tuples and dictionaries."""
    if isinstance(nested, torch.Tensor):
        yield from plain_tensors(nested)
    elif isinstance(nested, (list, tuple)):
        for item in nested:
            yield from tensors_in(item)
    elif isinstance(nested, dict):
        for item in nested.values():
            yield from tensors_in(item)


def plain_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors inside a wrapper (DTensor …); a plain tensor itself; nothing for others."""
    if not isinstance(tensor, torch.Tensor):
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(tensor, name))
