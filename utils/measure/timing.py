"""What this machine can do, and what a function costs on it in seconds, FLOPs and bytes.

    from utils.measure import timing

    print(timing.machine())                     # cores, memory, devices
    timing.seconds(lambda: model(x))            # the median of some repeats
    timing.in_turn({"a": f, "b": g})            # the minimum of each, to compare them
    timing.matmul_flops(1024)                   # FLOP/s of a matrix product
    timing.flops(lambda: model(x))              # FLOPs, counted from the shapes without a clock
    timing.saved_bytes(lambda: model(x).sum())  # what the forward pass keeps for the backward
    timing.link(ranks)                          # seconds per message, seconds per byte
    for x in timing.watched(arriving, log): …   # when this loop worked and when it waited

Counts are exact and the same everywhere; times are not, least of all on a busy machine.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from utils.measure.machine import machine

__all__ = [
    "Link",
    "alpha_beta",
    "flops",
    "in_turn",
    "link",
    "machine",
    "matmul_flops",
    "memory_bandwidth",
    "saved_bytes",
    "seconds",
    "watched",
]

Item = TypeVar("Item")


# ---- 1. the clock


def seconds(function: Callable[[], Any], repeats: int = 5, shortest: float = 0.005) -> float:
    """The median time of one call of `function()`, in seconds, after one warm-up call.

    Calls shorter than `shortest` seconds are timed in groups, so that the clock's own cost does not
    matter. If ranks communicate inside the function, pass shortest=0: otherwise each rank would
    choose the group size by its own clock. Waits for the GPU if there is one.
    """
    if repeats < 1:
        raise ValueError(f"repeats {repeats} measures nothing: give 1 or more")
    function()
    once = _time(function, 1)
    calls = max(1, round(shortest / max(once, 1e-9)))
    return statistics.median(_time(function, calls) / calls for _ in range(repeats))


def in_turn(functions: dict[str, Callable[[], Any]], rounds: int = 3) -> dict[str, float]:
    """{name: seconds of its fastest call}, with the functions called in turn `rounds` times.

    One warm-up call of each comes first. Taking turns exposes all functions to the same load of a
    busy machine. If no GPU is in use, the seconds are CPU time, summed over all threads of the
    process, so that waiting for other programs or for a disk does not count.
    """
    if rounds < 1:
        raise ValueError(f"rounds {rounds} measures nothing: give 1 or more")
    clock = time.perf_counter if torch.cuda.is_initialized() else time.process_time
    times = [[_time(f, 1, clock) for f in functions.values()] for _ in range(rounds + 1)]
    return {name: min(own) for name, own in zip(functions, zip(*times[1:]))}


def watched(items: Iterable[Item], log: list[tuple[str, float, float]]) -> Iterator[Item]:
    """Yield the items of `items`, and log when the loop over them worked and waited.

    log gets ("wait", begin, end) before each item, ("work", begin, end) after it, and a last wait
    for the end of `items`, in seconds of time.perf_counter().
    """
    end = object()
    items = iter(items)
    while True:
        asked = time.perf_counter()
        item = next(items, end)
        came = time.perf_counter()
        log.append(("wait", asked, came))
        if item is end:
            return
        yield item
        log.append(("work", came, time.perf_counter()))


def _time(function, calls, clock=time.perf_counter):
    _wait_for_gpu()
    start = clock()
    for _ in range(calls):
        function()
    _wait_for_gpu()
    return clock() - start


def _wait_for_gpu():
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


# ---- 2. what the device can do


def matmul_flops(
    size: int = 1024,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    repeats: int = 5,
) -> float:
    """FLOP/s of the product of two size × size matrices, which takes 2·size³ FLOPs."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.matmul(a, b, out=out), repeats)


def memory_bandwidth(
    device: torch.device | str = "cpu", size: int = 2**27, repeats: int = 5
) -> float:
    """Bytes/s of a copy of `size` bytes, each read once and written once.

    The default, 128 MiB, exceeds most caches, so that the memory itself is measured.
    """
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    return moved / seconds(lambda: target.copy_(source), repeats)


# ---- 3. what a computation costs, counted


def flops(function: Callable[[], Any]) -> int:
    """FLOPs of the matrix products and convolutions in one call of `function()`.

    They are counted from the shapes, including backward passes. During the count, attention runs as
    plain matrix products, because the counter does not know the CPU's fused kernel. Additions,
    normalizations and activation functions are not counted: they are at most a few percent.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def saved_bytes(function: Callable[[], Any], besides: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the tensors that autograd keeps for the backward pass while `function()` runs.

    A storage counts once, however often it is saved. `besides` lists tensors that do not count:
    parameters and inputs are in memory anyway.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in besides}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()  # the result holds the graph, the graph holds what was saved
    del result
    return sum(kept.values())


# ---- 4. the link between two ranks


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes alpha + beta·n seconds."""

    alpha: float  # latency: seconds before the first byte arrives
    beta: float  # seconds per byte: 1 / bandwidth
    sizes: tuple[int, ...] = ()  # bytes of the measured messages
    times: tuple[float, ...] = ()  # their seconds, one way

    def __call__(self, size: float) -> float:
        """Seconds that a message of `size` bytes should take."""
        return self.alpha + self.beta * size

    def __str__(self):
        return f"α = {self.alpha * 1e6:.0f} µs per message, 1/β = {1 / self.beta / 1e9:.2f} GB/s"


def alpha_beta(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """The fit (alpha, beta) of times ≈ alpha + beta·sizes, both at least 0.

    Least squares on the relative error, so that short messages count as much as long ones.
    """
    sizes, times = np.asarray(sizes, dtype=float), np.asarray(times, dtype=float)
    if len(sizes) < 2 or len(sizes) != len(times) or times.min() <= 0:
        raise ValueError(
            f"two or more sizes, each with a positive time, are needed: got "
            f"{len(sizes)} sizes and {len(times)} times"
        )
    rows = np.stack([1 / times, sizes / times], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
    if alpha < 0:  # fit a line through the origin
        alpha, beta = 0.0, (sizes / times).sum() / ((sizes / times) ** 2).sum()
    if beta < 0:  # fit a horizontal line
        alpha, beta = (1 / times).sum() / ((1 / times) ** 2).sum(), 0.0
    return float(alpha), float(beta)


def link(
    ranks: Any, sizes: Sequence[int] = (4, 2**12, 2**16, 2**20, 2**23), repeats: int = 7
) -> Link:
    """Send messages of `sizes` bytes from rank 0 to 1 and back; fit α and β to the fastest.

    `ranks` is an open `utils.ranks.Ranks` with two or more ranks.
    """
    if ranks.size < 2:
        raise ValueError(f"a link joins two ranks, but ranks.size is {ranks.size}: open Ranks(2)")
    times = ranks.run(_ping_pong, tuple(sizes), repeats)[0]
    return Link(*alpha_beta(sizes, times), tuple(sizes), tuple(times))


def _ping_pong(sizes, repeats):
    """Run on every rank; rank 0 returns the one-way seconds of each size."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    times = []
    for size in sizes:
        ball = torch.zeros(size, dtype=torch.uint8, device=device)
        trips = []
        for _ in range(repeats + 2):  # the first two warm up the connection
            dist.barrier()
            start = time.perf_counter()
            if dist.get_rank() == 0:
                dist.send(ball, 1)
                dist.recv(ball, 1)
            elif dist.get_rank() == 1:
                dist.recv(ball, 0)
                dist.send(ball, 0)
            _wait_for_gpu()
            trips.append((time.perf_counter() - start) / 2)
        times.append(min(trips[2:]))  # the minimum is the link's; the rest is waiting for a core
    return times
