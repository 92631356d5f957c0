"""Given: lets the ring and the tree run against each other, also over slow links."""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from utils.course.checks import load_answer
from utils.ranks import RankError, Ranks


@dataclass(frozen=True)
class Link:
    """What every message waits in addition: `alpha` seconds, and its bytes / `bandwidth`."""

    alpha: float  # seconds
    bandwidth: float  # bytes per second


def race(
    size: int, tensor_bytes: list[int], link: Link | None = None, repeats: int = 5
) -> dict[str, list[float]] | None:
    """Median seconds of both all-reduces for each tensor size: {"ring": [...], "tree": [...]}.

    Runs ring.py and tree_all_reduce.py of the current folder on `size` ranks.
    None, and a word, where one is missing.
    """
    with Ranks(size, device="cpu", timeout=20) as ranks:
        try:
            return ranks.run(_race, str(Path.cwd()), tensor_bytes, link, repeats)[0]
        except RankError as error:
            why = "is not written" if "NotImplementedError" in str(error) else "does not run"
            print(f"Nothing to measure yet: ring.py or tree_all_reduce.py {why}.")
            return None


def crossing(tensor_bytes: list[int], times: dict[str, list[float]]) -> float | None:
    """Bytes from which on the ring is faster and stays so; None: it is at no size measured.

    Between two sizes the point lies on the straight line through the two ratios, both logarithmic.
    """
    ratios = [math.log(ring / tree) for ring, tree in zip(times["ring"], times["tree"])]
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


@contextlib.contextmanager
def slow(link: Link | None) -> Iterator[None]:
    """Inside, sender and receiver sleep after each message as long as `link` would hold it up.

    The messages are real; a rank that sleeps leaves its core to the others, so that four ranks on
    two cores have four links of their own, like four machines.
    """
    send, receive = dist.send, dist.recv

    def delayed(transfer):
        def run(tensor, *args, **keywords):
            result = transfer(tensor, *args, **keywords)
            time.sleep(link.alpha + tensor.nbytes / link.bandwidth)
            return result

        return run

    if link is not None:
        dist.send, dist.recv = delayed(send), delayed(receive)
    try:
        yield
    finally:
        dist.send, dist.recv = send, receive


def _race(
    folder: str, tensor_bytes: list[int], link: Link | None, repeats: int
) -> dict[str, list[float]]:
    runners = {
        "ring": load_answer(Path(folder) / "ring.py").ring_all_reduce,
        "tree": load_answer(Path(folder) / "tree_all_reduce.py").tree_all_reduce,
    }
    times = {name: [] for name in runners}
    for all_reduce in runners.values():  # opens the connections
        all_reduce(torch.zeros(64))
    for size in tensor_bytes:
        tensor = torch.zeros(size // 4)
        trials = {name: [] for name in runners}
        for _ in range(repeats):  # in turns, so that a slow moment hits both
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
