"""What this machine can do, and what a piece of work costs on it: seconds, FLOPs, bytes.

    from utils.measure import timing

    print(timing.machine())                     # cores, memory, devices
    timing.seconds(lambda: model(x))            # the median of some repeats
    timing.in_turn({"a": f, "b": g})            # the least of each, to compare them
    timing.matmul_flops(1024)                   # FLOP/s of a matrix product
    timing.flops(lambda: model(x))              # FLOPs, counted from the shapes: no clock
    timing.saved_bytes(lambda: model(x).sum())  # what the forward pass keeps for the backward
    timing.link(ranks)                          # seconds per message, seconds per byte
    for x in timing.watched(arriving, log): …   # when this loop worked, and when it waited

Counts are exact and the same everywhere; times are not, above all on a busy machine.
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
    """The median time of a call of `function()`, in seconds, after one call to warm up.

    A call shorter than `shortest` seconds is timed several at once, so that the clock's own cost
    does not count; ranks that talk to one another in it give shortest=0, because each would choose
    that number by its own clock. Waits for the GPU where there is one.
    """
    if repeats < 1:
        raise ValueError(f"repeats {repeats} measures nothing: give 1 or more")
    function()
    once = _time(function, 1)
    calls = max(1, round(shortest / max(once, 1e-9)))
    return statistics.median(_time(function, calls) / calls for _ in range(repeats))


def in_turn(functions: dict[str, Callable[[], Any]], rounds: int = 3) -> dict[str, float]:
    """{name: seconds of its fastest call}: one call of each in turn, `rounds` times, after one of
    each to warm up. What else a busy machine does then meets all of them alike.

    Where no GPU is in use the seconds are those of the processor, all threads of the process
    together, so that waiting for other programs does not count, and neither does a disk.
    """
    if rounds < 1:
        raise ValueError(f"rounds {rounds} measures nothing: give 1 or more")
    clock = time.perf_counter if torch.cuda.is_initialized() else time.process_time
    times = [[_time(f, 1, clock) for f in functions.values()] for _ in range(rounds + 1)]
    return {name: min(own) for name, own in zip(functions, zip(*times[1:]))}


def watched(items: Iterable[Item], log: list[tuple[str, float, float]]) -> Iterator[Item]:
    """Hands on what comes out of `items`, and notes when the loop over it worked and waited.

    log gets ("wait", begin, end) before each item, ("work", begin, end) after it, and one more wait
    where `items` has something left to do after its last item; seconds of time.perf_counter().
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
    """FLOP/s of a product of two size × size matrices, which takes 2·size³ FLOPs."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.matmul(a, b, out=out), repeats)


def memory_bandwidth(
    device: torch.device | str = "cpu", size: int = 2**27, repeats: int = 5
) -> float:
    """Bytes/s of a copy of `size` bytes, each read once and written once.

    The default, 128 MiB, is more than most caches hold, so that the memory itself is measured.
    """
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    return moved / seconds(lambda: target.copy_(source), repeats)


# ---- 3. what a computation costs, counted


def flops(function: Callable[[], Any]) -> int:
    """FLOPs of the matrix products and convolutions inside one call of `function()`.

    They are counted from the shapes, backward passes included. Attention runs as plain matrix
    products meanwhile, because the counter does not know the CPU's fused kernel. Additions,
    normalizations and activation functions are not counted: they are below a few per cent.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def saved_bytes(function: Callable[[], Any], besides: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the tensors that autograd keeps for the backward pass while `function()` runs.

    A storage counts once however often it is saved. `besides` lists tensors that do not count:
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

    alpha: float  # seconds before the first byte arrives: the latency
    beta: float  # seconds per byte: 1 / bandwidth
    sizes: tuple[int, ...] = ()  # bytes of the messages measured
    times: tuple[float, ...] = ()  # their seconds, one way

    def __call__(self, size: float) -> float:
        """Seconds that a message of `size` bytes should take."""
        return self.alpha + self.beta * size

    def __str__(self):
        return f"α = {self.alpha * 1e6:.0f} µs a message, 1/β = {1 / self.beta / 1e9:.2f} GB/s"


def alpha_beta(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(alpha, beta) of times ≈ alpha + beta·sizes, both at least 0.

    Least squares on the relative error, so that short messages weigh as much as long ones.
    """
    sizes, times = np.asarray(sizes, dtype=float), np.asarray(times, dtype=float)
    if len(sizes) < 2 or len(sizes) != len(times) or times.min() <= 0:
        raise ValueError(
            f"two or more sizes, each with a time above 0, are needed: got "
            f"{len(sizes)} sizes and {len(times)} times"
        )
    rows = np.stack([1 / times, sizes / times], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
    if alpha < 0:  # the line through the origin
        alpha, beta = 0.0, (sizes / times).sum() / ((sizes / times) ** 2).sum()
    if beta < 0:  # the level line
        alpha, beta = (1 / times).sum() / ((1 / times) ** 2).sum(), 0.0
    return float(alpha), float(beta)


def link(
    ranks: Any, sizes: Sequence[int] = (4, 2**12, 2**16, 2**20, 2**23), repeats: int = 7
) -> Link:
    """Sends messages of `sizes` bytes from rank 0 to 1 and back, and fits α and β to the fastest.

    `ranks` is an open `utils.ranks.Ranks` of two or more.
    """
    if ranks.size < 2:
        raise ValueError(f"a link joins two ranks, and these are {ranks.size}: open Ranks(2)")
    times = ranks.run(_ping_pong, tuple(sizes), repeats)[0]
    return Link(*alpha_beta(sizes, times), tuple(sizes), tuple(times))


def _ping_pong(sizes, repeats):
    """Runs on every rank; rank 0 returns the one-way seconds of each size."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    times = []
    for size in sizes:
        ball = torch.zeros(size, dtype=torch.uint8, device=device)
        trips = []
        for _ in range(repeats + 2):  # the first two warm the connection up
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
        times.append(min(trips[2:]))  # what the link can do; the rest is waiting for a core
    return times
