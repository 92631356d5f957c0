"""The spans of real ranks, against DDP's own count and a second clock."""

import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel

from utils.measure import profile
from utils.measure.profile import Span
from utils.ranks import Ranks


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, device="cpu") as two:
        yield two


def layers(count):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(count)])


def traced(bucket_cap_mb, rows=256):
    """A rank's spans of a DDP step, and the number of buckets that a communication hook counted."""
    model = DistributedDataParallel(layers(6), bucket_cap_mb=bucket_cap_mb)
    x, seen = torch.randn(rows, 256), set()

    def all_reduce(_, bucket):
        seen.add(bucket.index())
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / dist.get_world_size())

    model.register_comm_hook(None, all_reduce)

    def step():
        seen.clear()
        model(x).square().mean().backward()

    return profile.record(step), len(seen)


def test_one_all_reduce_for_each_bucket(ranks):
    for bucket_cap_mb, expected in ((100, 1), (0.6, 2), (0.25, 6)):  # a layer is 0.251 MB
        for spans, buckets in ranks.run(traced, bucket_cap_mb):
            kinds = [span.kind for span in profile.communication(spans)]
            assert kinds == ["all_reduce"] * buckets
            assert buckets == expected


def one_large_all_reduce():
    """Spans of a 32 MB all-reduce, and its ms by a clock around the call."""
    x, clock = torch.ones(8 << 20), []

    def step():
        start = time.perf_counter()
        dist.all_reduce(x)
        clock.append(1e3 * (time.perf_counter() - start))

    return profile.record(step), clock[-1]


def test_duration_agrees_with_a_second_clock(ranks):
    tries = [ranks.run(one_large_all_reduce) for _ in range(5)]
    for of_rank in zip(*tries):  # the fastest: its threads waited least for a core
        (span,), ms = min(of_rank, key=lambda found: found[1])
        assert 0.5 * ms < span.ms < 1.2 * ms


def test_buckets_leave_during_the_backward_pass_in_order(ranks):
    for spans, _ in ranks.run(traced, 0.25, rows=8192):
        backward = [span for span in spans if span.kind == "backward"]
        talk = profile.communication(spans)
        starts = [span.start for span in talk]
        assert starts == sorted(starts)
        assert backward[0].start < starts[0] < starts[1] < backward[-1].end
        assert 0 < profile.hidden(spans) <= 1


def without_overlap():
    model = layers(4)
    x = torch.randn(256, 256)

    def step():
        with torch.profiler.record_function("forward"):
            loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)

    return profile.record(step)


def test_all_reduces_after_the_backward_pass_are_not_hidden(ranks):
    for spans in ranks.run(without_overlap):
        kinds = [span.kind for span in spans]
        assert kinds[0] == "forward" and kinds.count("all_reduce") == 8
        assert profile.hidden(spans) < 0.01


def test_hidden_is_the_covered_share():
    talk = [Span("all_reduce", 0, 4), Span("all_reduce", 2, 8)]
    assert profile.hidden([Span("backward", 0, 2), *talk]) == pytest.approx(0.25)
    assert profile.hidden([Span("backward", 0, 9), *talk]) == pytest.approx(1.0)
    assert profile.hidden([Span("backward", 8, 9), *talk]) == 0.0
    assert profile.hidden([]) == 0.0


@pytest.mark.skipif(profile.loopback_bytes() is None, reason="needs Linux's /proc/net/dev")
def test_loopback_bytes_counts_what_is_sent_here():
    receiver, sender = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    receiver.bind(("127.0.0.1", 0))
    before = profile.loopback_bytes()
    for _ in range(50):
        sender.sendto(bytes(20_000), receiver.getsockname())
    assert profile.loopback_bytes() - before >= 50 * 20_000
    receiver.close(), sender.close()


def test_loopback_bytes_are_unknown_without_the_file(monkeypatch):
    monkeypatch.setattr(profile, "Path", lambda name: Path("/nowhere") / "dev")
    assert profile.loopback_bytes() is None


def event(name, start, end, device=DeviceType.CUDA, annotation=False):
    span = SimpleNamespace(start=1e3 * start, end=1e3 * end)
    return SimpleNamespace(
        name=name, time_range=span, device_type=device, is_user_annotation=annotation
    )


def test_on_a_gpu_kernels_count_not_what_the_cpu_queued():
    spans = profile.spans(
        [
            event("autograd::engine::evaluate_function: MmBackward0", 0, 1, DeviceType.CPU),
            event("nccl:all_reduce", 4, 9, annotation=True),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 5, 9),
            event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgs)", 9, 10),
            event("ampere_sgemm_128x64_nn", 3, 6),
            event("Memset (Device)", 3, 4),
        ]
    )
    assert spans == [
        Span("compute", 0, 3),
        Span("all_reduce", 2, 6),
        Span("reduce_scatter", 6, 7),
    ]
    assert profile.spans([]) == []
