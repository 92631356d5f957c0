"""Given: lets the rings and the tree run against each other, also over slow links."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from utils.course.runner import load_answer
from utils.ranks import RankError, Ranks

RUNNERS = {  # name -> file of the current folder, and the function in it
    "ring": ("ring.py", "ring_all_reduce"),
    "tree": ("tree_all_reduce.py", "tree_all_reduce"),
    "asynchronous ring": ("asynchronous_ring.py", "asynchronous_ring_all_reduce"),
}


@dataclass(frozen=True)
class Link:
    """What every message takes in addition: `alpha` seconds, and its bytes / `bandwidth`."""

    alpha: float  # seconds
    bandwidth: float  # bytes per second


def race(
    size: int,
    tensor_bytes: list[int],
    link: Link | None = None,
    repeats: int = 5,
    runners: Sequence[str] = ("ring", "tree"),
) -> dict[str, list[float]] | None:
    """Median seconds of these all-reduces for each tensor size: {"ring": [...], "tree": [...]}.

    runners: names of RUNNERS; their files of the current folder run on `size` ranks.
    None, and a word, where one is missing.
    """
    with Ranks(size, device="cpu", timeout=20) as ranks:
        try:
            return ranks.run(_race, str(Path.cwd()), tensor_bytes, link, repeats, tuple(runners))[0]
        except RankError as error:
            why = "is not written" if "NotImplementedError" in str(error) else "does not run"
            files = [RUNNERS[name][0] for name in runners]
            listed = f"{', '.join(files[:-1])} or {files[-1]}"
            print(f"Nothing to measure yet: {listed} {why}.")
            return None


def crossing(
    tensor_bytes: list[int], times: dict[str, list[float]], ring: str = "ring"
) -> float | None:
    """Bytes from which on a ring is faster than the tree and stays so; None: at no size measured.

    Between two sizes the point lies on the straight line through the two ratios, both logarithmic.
    """
    ratios = [math.log(mine / tree) for mine, tree in zip(times[ring], times["tree"])]
    if ratios[-1] >= 0:
        return None
    first = len(ratios) - 1  # the first size of those at the end that the ring wins
    while first and ratios[first - 1] < 0:
        first -= 1
    if first == 0:
        return float(tensor_bytes[0])
    before, after = ratios[first - 1], ratios[first]
    low, high = tensor_bytes[first - 1], tensor_bytes[first]
    return low * (high / low) ** (before / (before - after))


def theory(size: int, link: Link) -> float:
    """The crossover in bytes, by the formula in your tree_all_reduce.py."""
    answer = load_answer(Path.cwd() / "tree_all_reduce.py")
    return answer.crossover_bytes(size, link.alpha, 1 / link.bandwidth)


def theory_at_once(size: int, link: Link) -> float:
    """The crossover in bytes of a ring whose ranks send and receive at the same time."""
    tree, ring = 2 * math.ceil(math.log2(size)), 2 * (size - 1)
    return link.alpha * link.bandwidth * max(0, ring - tree) / (tree - ring / size)


class _SlowWork:
    """A message that is through some time after the other rank has taken it."""

    def __init__(self, work: Any, through: Future):
        self._work, self._through = work, through

    def wait(self, *args: Any, **keywords: Any) -> bool:
        """As `Work.wait`."""
        time.sleep(max(0.0, self._through.result() - time.monotonic()))
        return True

    def __getattr__(self, name):
        return getattr(self._work, name)


@contextlib.contextmanager
def slow(link: Link | None) -> Iterator[None]:
    """Inside, messages take as long as `link` says; a rank can send one and receive one at a time.

    The messages are real; a rank that sleeps leaves its core to the others, so that four ranks on
    two cores have four links of their own, like four machines. Blocking calls are slow too: PyTorch
    starts a message and waits for it.
    """
    before = {name: getattr(dist, name) for name in ("isend", "irecv")}

    def delayed(start: Callable, threads: ThreadPoolExecutor) -> Callable:
        free = 0.0  # this way is busy until then

        def through(work, count: int) -> float:
            nonlocal free
            work.wait()
            free = max(free, time.monotonic()) + link.alpha + count / link.bandwidth
            return free

        def run(tensor, *args, **keywords):
            work = start(tensor, *args, **keywords)
            return _SlowWork(work, threads.submit(through, work, tensor.nbytes))

        return run

    with contextlib.ExitStack() as stack:
        for name, start in before.items() if link is not None else ():
            threads = stack.enter_context(ThreadPoolExecutor(1))  # one after another
            replaced = delayed(start, threads)
            for module in (dist, dist.distributed_c10d):
                stack.callback(setattr, module, name, start)
                setattr(module, name, replaced)
        yield


def _race(
    folder: str, tensor_bytes: list[int], link: Link | None, repeats: int, names: tuple[str, ...]
) -> dict[str, list[float]]:
    runners = {}
    for name in names:
        file, function = RUNNERS[name]
        runners[name] = getattr(load_answer(Path(folder) / file), function)
    times = {name: [] for name in runners}
    for all_reduce in runners.values():  # opens the connections
        all_reduce(torch.zeros(64))
    for size in tensor_bytes:
        tensor = torch.zeros(size // 4)
        trials = {name: [] for name in runners}
        for _ in range(repeats):  # in turns, so that a slow moment hits all
            for name, all_reduce in runners.items():
                with slow(link):
                    trials[name].append(_slowest(all_reduce, tensor))
        for name in runners:
            times[name].append(statistics.median(trials[name]))
    return times


def _slowest(all_reduce, tensor: torch.Tensor) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    all_reduce(tensor)
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()
