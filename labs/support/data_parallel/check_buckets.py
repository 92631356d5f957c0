"""Given: what the check cell of exercise 01c looks at.

1, 2, 3 and 4 real ranks train a small network for two steps with your buckets. The gradients must
equal one rank's; `utils.measure.traffic` tells when each all-reduce starts and how many bytes it
has.
"""

import datetime
import itertools
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from utils.course.checks import Wrong, on_ranks
from utils.measure.traffic import Traffic

RANKS = (1, 2, 3, 4)
WIDTHS = [7, 11, 13, 5, 3]  # odd sizes, so that nothing is divisible by chance
BUCKETS = (1, 800, 10**6)  # bytes: a bucket per parameter, some, one
STEPS, ROWS = 2, 12
IN_HOOK = (
    "Is there a wait (or an all-reduce without async_op=True) inside the hook? Only wait() waits."
)


def bucketed(path: Path) -> str:
    """Judges `make_buckets` and `BucketedAllReduce` in the file."""
    parameters = dict(_network().named_parameters())
    sizes = [p.numel() * p.element_size() for p in parameters.values()]
    expected = {limit: _expected_buckets(sizes, limit) for limit in BUCKETS}
    for limit, buckets in zip(BUCKETS, on_ranks(1, path, _buckets)[0]):
        _right_buckets(buckets, list(parameters), expected[limit], f"with bucket_bytes={limit}")
    for size in RANKS:
        for limit, ranks in zip(BUCKETS, zip(*on_ranks(size, path, _train_all))):
            for rank, result in enumerate(ranks):
                case = f"with {size} ranks and buckets of {limit} bytes, rank {rank}"
                _right_gradients(result, size, case)
                _right_reduces(result, expected[limit], case)
    with tempfile.TemporaryDirectory() as folder:
        _overlap(on_ranks(2, path, _late_partner, folder))
    return (
        "gradients equal one rank's on 1, 2, 3 and 4 ranks, two steps in a row;\n"
        "one all-reduce a bucket, every gradient's bytes once;\n"
        "buckets leave before the backward pass ends, and it never waits for another rank."
    )


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).double()


def _expected_buckets(sizes: list[int], bucket_bytes: int) -> list[int]:
    """Bytes of each bucket, as the exercise describes them."""
    buckets = []
    for size in reversed(sizes):
        if not buckets or buckets[-1] + size > bucket_bytes:
            buckets.append(0)
        buckets[-1] += size
    return buckets


def _buckets(answer) -> list[list[list[int]]]:
    """On one rank: the answer's buckets for each size, parameters by number."""
    result = []
    for limit in BUCKETS:
        parameters = list(_network().parameters())
        number_of = {p: index for index, p in enumerate(parameters)}
        buckets = answer.make_buckets(parameters, limit)
        result.append([[number_of[p] for p in bucket] for bucket in buckets])
    return result


def _train_all(answer) -> list[dict]:
    return [_train(answer, limit) for limit in BUCKETS]


def _train(answer, bucket_bytes: int) -> dict:
    """On a rank: two steps on its rows; the gradients of one rank for comparison."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, alone = _network(), _network()
    result = {"names": [name for name, _ in model.named_parameters()], "steps": []}
    with Traffic() as traffic:
        at_last = []  # all-reduces that had started when the last gradient was ready
        first = next(model.parameters())
        first.register_post_accumulate_grad_hook(lambda _: at_last.append(len(traffic.events)))
        reducer = answer.BucketedAllReduce(model, bucket_bytes)
        for step in range(STEPS):
            x = torch.randn(ROWS, WIDTHS[0], generator=torch.Generator().manual_seed(step)).double()
            mine = x[rank * ROWS // size : (rank + 1) * ROWS // size]
            model.zero_grad()
            before = len(traffic.events)
            model(mine).square().mean().backward()
            after_backward = len(traffic.events)
            local = [p.grad.clone() for p in model.parameters()]
            reducer.wait()
            events = [(e.op, e.payload) for e in traffic.events[before:]]
            alone.zero_grad()
            alone(x).square().mean().backward()
            whole = [p.grad for p in alone.parameters()]
            grads = [p.grad.clone() for p in model.parameters()]
            result["steps"].append(
                {
                    "grads": grads,
                    "local": local,
                    "whole": whole,
                    "events": events,
                    "at_last": at_last[-1] - before,
                    "in_backward": after_backward - before,
                }
            )
    return result


def _right_buckets(
    buckets: list[list[int]], names: list[str], expected: list[int], case: str
) -> None:
    order = [index for bucket in buckets for index in bucket]
    lost = [name for index, name in enumerate(names) if index not in order]
    if lost:
        raise Wrong(
            f"{case}: make_buckets leaves out {', '.join(lost)}.\n"
            "The last bucket counts too, though it is not full."
        )
    if order != list(range(len(names)))[::-1]:
        raise Wrong(
            f"{case}: make_buckets puts the parameters into the order {order};\n"
            "the backward pass makes the last layer's gradients first."
        )
    if len(buckets) != len(expected):
        raise Wrong(f"{case}: make_buckets makes {len(buckets)} buckets, not {len(expected)}.")


def _right_gradients(result: dict, size: int, case: str) -> None:
    for number, step in enumerate(result["steps"]):
        close = [
            torch.allclose(g, w, rtol=1e-9, atol=1e-12)
            for g, w in zip(step["grads"], step["whole"])
        ]
        if all(close):
            continue
        wrong = [name for name, ok in zip(result["names"], close) if not ok]
        pairs = [
            (g, w, x)
            for g, w, x, ok in zip(step["grads"], step["whole"], step["local"], close)
            if not ok
        ]
        if all(torch.allclose(g, size * w) for g, w, _ in pairs):
            hint = f"They are {size} times one rank's: the sum is not divided by the ranks."
        elif all(g.equal(x) for g, _, x in pairs):
            hint = "They are still this rank's own: does every bucket start, and is it copied back?"
        else:
            hint = "Do the numbers go back to the parameters that they came from?"
        late = f"in step {number + 1} " if number else ""
        again = "\nStep 1 was right: is everything reset for the next step?" if number else ""
        raise Wrong(
            f"{case}: {late}the gradients of {', '.join(wrong)} differ from one rank's.\n"
            f"{hint}{again}"
        )


def _right_reduces(result: dict, expected: list[int], case: str) -> None:
    for number, step in enumerate(result["steps"]):
        reduces = [payload for op, payload in step["events"] if op == "all_reduce"]
        other = sorted({op for op, _ in step["events"]} - {"all_reduce"})
        if other:
            raise Wrong(f"{case}: a step also calls {', '.join(other)}; all-reduces are enough.")
        if len(reduces) != len(expected):
            again = f"in step {number + 1} " if number else ""
            hint = "send each bucket once, as one tensor."
            if number:
                hint = "step 1 was right: is everything reset for the next step?"
            raise Wrong(
                f"{case}: {again}{len(reduces)} all-reduces for {len(expected)} buckets:\n{hint}"
            )
        if sorted(reduces) != sorted(expected):
            raise Wrong(f"{case}: all-reduces of {reduces} bytes, the buckets have {expected}.")
        if step["in_backward"] == 0:
            raise Wrong(
                f"{case}: no all-reduce starts before the backward pass has ended: nothing "
                "overlaps.\nStart a bucket in the hook, as soon as it is complete."
            )
        if step["at_last"] < len(expected) - 1:
            raise Wrong(
                f"{case}: when the last gradient was ready, {step['at_last']} of "
                f"{len(expected)} buckets were on their way, and all but one could be."
            )


def _late_partner(answer, folder: str) -> bool:
    """On a rank: rank 1 begins its backward pass only after rank 0 has ended its own."""
    done = dist.FileStore(f"{folder}/store", 2)
    model = _network()
    reducer = answer.BucketedAllReduce(model, BUCKETS[1])
    loss = model(torch.ones(ROWS, WIDTHS[0]).double()).square().mean()
    in_time = True
    if dist.get_rank() == 1:
        in_time = _wait_for(done, seconds=3.0)
    loss.backward()
    if dist.get_rank() == 0:
        done.set("backward ended", "yes")
    reducer.wait()
    return in_time


def _wait_for(store: dist.Store, seconds: float) -> bool:
    try:
        store.wait(["backward ended"], datetime.timedelta(seconds=seconds))
    except RuntimeError:  # the time is over
        return False
    return True


def _overlap(in_time: list[bool]) -> None:
    if not all(in_time):
        raise Wrong(
            "rank 0 cannot end its backward pass before rank 1 has begun its own: the hook "
            f"waits, and nothing overlaps.\n{IN_HOOK}"
        )
