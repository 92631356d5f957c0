"""Given: races between the rings and the tree, also over slow links."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from utils.course.runner import load_answer
from utils.ranks import RankError, Ranks

RUNNERS = {  # name -> file in the current folder, and the function in it
    "ring": ("ring.py", "ring_all_reduce"),
    "tree": ("tree_all_reduce.py", "tree_all_reduce"),
    "asynchronous ring": ("asynchronous_ring.py", "asynchronous_ring_all_reduce"),
}


@dataclass(frozen=True)
class Link:
    """The extra time of every message: `alpha` seconds, plus its bytes / `bandwidth`."""

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

    runners: names from RUNNERS; their files in the current folder run on `size` ranks.
    If one does not run, prints why and returns None.
    """
    with Ranks(size, device="cpu", timeout=20) as ranks:
        try:
            return ranks.run(_race, Path.cwd(), tensor_bytes, link, repeats, runners)[0]
        except RankError as error:
            why = "is not written" if "NotImplementedError" in str(error) else "does not run"
            files = [RUNNERS[name][0] for name in runners]
            print(f"Nothing to measure yet: {', '.join(files[:-1])} or {files[-1]} {why}.")
            return None


def crossing(
    tensor_bytes: list[int], times: dict[str, list[float]], ring: str = "ring"
) -> float | None:
    """Bytes above which a ring stays faster than the tree; None if it loses at the largest size.

    Between two sizes, log(ratio) is interpolated linearly in log(bytes).
    """
    ratios = [math.log(mine / tree) for mine, tree in zip(times[ring], times["tree"])]
    ahead = [place for place, ratio in enumerate(ratios) if ratio >= 0]  # where the tree is
    if not ahead:
        return float(tensor_bytes[0])
    if ahead[-1] == len(ratios) - 1:
        return None
    (before, after), (low, high) = (x[ahead[-1] :][:2] for x in (ratios, tensor_bytes))
    return low * (high / low) ** (before / (before - after))


def theory(size: int, link: Link) -> float:
    """The crossover in bytes, by the formula in your tree_all_reduce.py."""
    answer = load_answer(Path.cwd() / "tree_all_reduce.py")
    return answer.crossover_bytes(size, link.alpha, 1 / link.bandwidth)


def theory_at_once(size: int, link: Link) -> float:
    """The crossover in bytes of a ring whose ranks send and receive at the same time."""
    tree, ring = 2 * math.ceil(math.log2(size)), 2 * (size - 1)
    return link.alpha * link.bandwidth * max(0, ring - tree) / (tree - ring / size)


@contextlib.contextmanager
def slow(link: Link | None) -> Iterator[None]:
    """Inside, messages take as long as `link` says; a rank can send one and receive one at a time.

    The messages are real. A sleeping rank leaves its core to the others, so four ranks on two cores
    each have a link of their own, like four machines. Blocking calls are slow too, because PyTorch
    implements them as a start and a wait.
    """

    def through(work: dist.Work, count: int) -> None:
        work.wait()
        time.sleep(link.alpha + count / link.bandwidth)

    def delayed(start: Callable, way: ThreadPoolExecutor, tensor: torch.Tensor, *args, **keywords):
        message = way.submit(through, start(tensor, *args, **keywords), tensor.nbytes)
        message.wait = message.result
        return message

    with contextlib.ExitStack() as stack:
        for name in ("isend", "irecv") if link is not None else ():
            way = stack.enter_context(ThreadPoolExecutor(1))  # one message at a time
            replaced = functools.partial(delayed, getattr(dist, name), way)
            for module in (dist, dist.distributed_c10d):
                stack.enter_context(mock.patch.object(module, name, replaced))
        yield


def _race(
    folder: Path, tensor_bytes: list[int], link: Link | None, repeats: int, names: Sequence[str]
) -> dict[str, list[float]]:
    files = [RUNNERS[name] for name in names]
    runners = [getattr(load_answer(folder / file), function) for file, function in files]
    for all_reduce in runners:  # opens the connections
        all_reduce(torch.zeros(64))
    times = torch.zeros(len(runners), len(tensor_bytes), repeats)
    for size, numbers in enumerate(tensor_bytes):
        tensor = torch.zeros(numbers // 4)
        for trial in range(repeats):  # alternating, so that a slow moment affects all
            for runner, all_reduce in enumerate(runners):
                with slow(link):
                    dist.barrier()
                    start = time.perf_counter()
                    all_reduce(tensor)
                    times[runner, size, trial] = time.perf_counter() - start
    dist.all_reduce(times, op=dist.ReduceOp.MAX)  # until the last rank is done
    return dict(zip(names, times.median(dim=2).values.tolist()))
